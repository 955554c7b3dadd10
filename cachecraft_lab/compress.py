"""Full cache + kept indices -> a smaller KV cache. Pairs are removed, not masked; nobody's input is changed."""

from __future__ import annotations

from torch import Tensor
from transformers import DynamicCache

from .errors import InputError
from .policies.base import Kept
from .prefill import Prefill
from .select import check_kept


def gather(states: Tensor, kept: Tensor) -> Tensor:
    """Rows of ``states [kv_heads, n, head_dim]`` at ``kept [kv_heads, m]``: a new ``[kv_heads, m, head_dim]``."""
    return states.gather(1, kept[..., None].expand(-1, -1, states.shape[-1]))


def full_kept(prefill: Prefill) -> Kept:
    """Kept indices that keep everything."""
    n = prefill.n_tokens
    return tuple(layer.keys.new_ones(layer.n_kv_heads, n, dtype=int).cumsum(-1) - 1 for layer in prefill.layers)


def check(prefill: Prefill, kept: Kept) -> None:
    """Refuse kept indices that break the contract of ``select.py``; layers may keep different counts."""
    if len(kept) != len(prefill.layers):
        raise InputError(f"kept indices: expected {len(prefill.layers)} layers, got {len(kept)}")
    for layer, indices in zip(prefill.layers, kept, strict=True):
        n_keep = indices.shape[-1]
        check_kept(indices, layer.n_kv_heads, layer.n_tokens, n_keep, who=f"layer {layer.index}")


def compress(prefill: Prefill, kept: Kept) -> DynamicCache:
    """A transformers ``DynamicCache`` (batch of one) of the kept pairs, keys with their original RoPE positions.

    Decode from it with position ids that go on from ``prefill.n_tokens``, not from the shorter cache length.
    """
    check(prefill, kept)
    cache = DynamicCache()
    for layer, indices in zip(prefill.layers, kept, strict=True):
        cache.update(gather(layer.keys, indices)[None], gather(layer.values, indices)[None], layer.index)
    return cache


def kept_bytes(prefill: Prefill, kept: Kept) -> int:
    """Bytes of the compressed KV cache, from the real tensor sizes."""
    per_pair = 2 * prefill.layers[0].keys.shape[-1] * prefill.layers[0].keys.element_size()
    return sum(indices.numel() for indices in kept) * per_pair
