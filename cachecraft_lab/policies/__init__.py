"""Eviction policies by name: FRC, kvpress's baselines, and your own."""

from . import frc, kvpress  # noqa: F401  (importing registers them)
from .base import Kept, Policy, keep, keep_all, make_policy, policy_names, register_policy
from .frc import FRC
from .kvpress import PolicyPress, from_press

__all__ = [
    "FRC",
    "Kept",
    "Policy",
    "PolicyPress",
    "from_press",
    "keep",
    "keep_all",
    "make_policy",
    "policy_names",
    "register_policy",
]
