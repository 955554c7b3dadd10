"""FRC, Feature-Rich Compression (CacheCraft, arXiv:2608.14555): three attention signals, fixed weights, chunk top-k.

The paper names the signals and the selection; its constants and the exact reading of "local" are not public. The
ones below were calibrated here, on samples that no reported result uses, and are frozen for all models: see
docs/calibration.md for the split, the sweep and the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..errors import InputError
from ..features import (
    common_scale,
    group_reduce,
    local_attention,
    max_salience,
    neighbourhood_density,
    window_attention,
)
from ..prefill import PrefillLayer
from ..select import chunk_order
from .base import Policy, register_policy

READINGS = {"window": window_attention, "local": local_attention}


@register_policy("frc")
@dataclass(frozen=True)
class FRC(Policy):
    """score = w_a * attention received + w_d * neighbourhood density + w_s * KV-head maximum salience.

    Attributes:
        reading: which queries are "local": ``window`` (the last W of the context) or ``local`` (the W after a key).
        window: W, in tokens.
        group: how query heads of one KV head are joined, ``mean`` or ``max``.
        pool: width of the neighbourhood, in tokens (odd).
        scale: the common scale that each signal is brought to, per layer (``features.common_scale``).
        w_attention, w_density, w_salience: the fixed weights.
        chunk_length: tokens a chunk of the selection; 1 is token top-k.
        n_sink, n_recent: first and last tokens that are always kept.
    """

    reading: str = "window"
    window: int = 8
    group: str = "mean"
    pool: int = 45
    scale: str = "mean"
    w_attention: float = 1.0
    w_density: float = 4.0
    w_salience: float = 4.0
    chunk_length: int = 16
    n_sink: int = 4
    n_recent: int = 0
    name = "frc"
    needs = frozenset({"hidden_states"})
    paper = "arXiv:2608.14555"

    def __post_init__(self) -> None:
        if self.reading not in READINGS:
            raise InputError(f"FRC reading {self.reading!r} is unknown; use one of {sorted(READINGS)}")

    @property
    def min_tokens(self) -> int:
        return self.window + 1

    def received(self, layer: PrefillLayer) -> Tensor:
        """Local attention received, joined over the query heads of a KV head: ``[kv_heads, n]``, in [0, 1]."""
        return layer.remember(
            (self.reading, self.window, self.group),
            lambda: group_reduce(READINGS[self.reading](layer, self.window), layer.n_kv_heads, self.group),
        )

    def signals(self, received: Tensor) -> dict[str, Tensor]:
        """The three signals of attention received, on their common scale, each ``[kv_heads, n]`` float32."""
        raw = {
            "attention": received,
            "density": neighbourhood_density(received, self.pool),
            "salience": max_salience(received),
        }
        return {name: common_scale(signal, self.scale) for name, signal in raw.items()}

    def score_of(self, received: Tensor) -> Tensor:
        """The fixed weighted sum."""
        signals = self.signals(received)
        return (
            self.w_attention * signals["attention"]
            + self.w_density * signals["density"]
            + self.w_salience * signals["salience"]
        )

    def score(self, layer: PrefillLayer, ratio: float) -> Tensor:
        return self.score_of(self.received(layer))

    def rank(self, scores: Tensor) -> Tensor:
        return chunk_order(scores, self.chunk_length, n_sink=self.n_sink, n_recent=self.n_recent)
