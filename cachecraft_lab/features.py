"""Named signals over one prefill layer, each a small pure function. Higher means more worth keeping.

The first axis is query heads or KV heads as said, the last is the context position. All are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import InputError
from .prefill import PrefillLayer


def attention_rows(layer: PrefillLayer, window: int) -> Tensor:
    """Causal attention weights of the last ``window`` queries over all keys: no n x n matrix is formed.

    Worked out once a layer for all policies that look through this window.

    Returns:
        ``[heads, window, n]``, rows sum to 1.
    """
    check_window(layer.n_tokens, window)
    return layer.remember(("attention_rows", window), lambda: _attention_rows(layer, window))


def _attention_rows(layer: PrefillLayer, window: int) -> Tensor:
    n = layer.n_tokens
    query = layer.queries(n - window).unflatten(0, (layer.n_kv_heads, layer.group_size))
    # grouped heads side by side, so that no key is repeated; softmax in float32, as the model's own attention
    weights = torch.einsum("kgqd,knd->kgqn", query, layer.keys) * layer.module.scaling
    future = torch.ones(window, n, dtype=torch.bool, device=weights.device).triu(n - window + 1)
    return weights.masked_fill_(future, float("-inf")).softmax(-1, dtype=torch.float32).flatten(0, 1)


def window_attention(layer: PrefillLayer, window: int) -> Tensor:
    """Attention that each key receives from the last ``window`` queries, the observation window (SnapKV's reading).

    Averaged over the queries that can see the key (fewer inside the window).

    Returns:
        ``[heads, n]``, in [0, 1].
    """
    n = layer.n_tokens
    received = attention_rows(layer, window).sum(dim=1)
    seen_by = torch.arange(n, 0, -1, device=received.device).clamp(max=window)
    return received / seen_by


def local_attention(layer: PrefillLayer, window: int) -> Tensor:
    """Attention that each key receives from the queries near it: those at distance 0 to ``window - 1`` after it.

    Each query's softmax runs over the ``window`` keys up to and with its own, so cost and memory are
    O(n * window) and no n x n matrix exists. Averaged over the queries that see the key (fewer at the end).

    Returns:
        ``[heads, n]``, in [0, 1].
    """
    n, kv_heads, group = layer.n_tokens, layer.n_kv_heads, layer.group_size
    check_window(n, window)
    blocks = -(-n // window)
    pad = blocks * window - n
    query = F.pad(layer.queries(), (0, 0, 0, pad)).unflatten(1, (blocks, window))  # [heads, blocks, w, d]
    query = query.unflatten(0, (kv_heads, group))
    # the keys of a block's queries lie in the block itself and the one before it
    key = F.pad(layer.keys, (0, 0, window, pad)).unfold(1, 2 * window, window)[:, :blocks]  # [kv, blocks, d, 2w]
    weights = torch.einsum("kgbqd,kbdj->kgbqj", query.float(), key.float()) * layer.module.scaling

    row = torch.arange(window, device=weights.device)[:, None]
    col = torch.arange(2 * window, device=weights.device)[None] - window  # key position relative to the block
    band = (col <= row) & (col > row - window)
    exists = torch.arange(blocks, device=weights.device)[:, None, None] * window + col >= 0
    weights = weights.masked_fill_(~(band & exists), float("-inf")).softmax(-1)
    real = (torch.arange(blocks * window, device=weights.device) < n).view(blocks, window, 1)
    received = (weights * real).sum(dim=3)  # [kv, group, blocks, 2w]: block b's queries to blocks b-1 and b
    total = received.new_zeros(kv_heads, group, (blocks + 1) * window)
    total[..., window:] += received[..., window:].flatten(2)
    total[..., :-window] += received[..., :window].flatten(2)
    seen_by = torch.arange(n, 0, -1, device=weights.device).clamp(max=window)
    return (total[..., window : window + n] / seen_by).flatten(0, 1)


def group_reduce(signal: Tensor, n_kv_heads: int, how: str) -> Tensor:
    """Query heads -> the KV head they share, by ``mean`` or ``max``: ``[heads, n]`` -> ``[kv_heads, n]``."""
    grouped = signal.unflatten(0, (n_kv_heads, -1))
    if how == "mean":
        return grouped.mean(dim=1)
    if how == "max":
        return grouped.amax(dim=1)
    raise InputError(f"group reduction {how!r} is unknown; use 'mean' or 'max'")


def neighbourhood_density(signal: Tensor, width: int) -> Tensor:
    """Mean of ``signal`` over the ``width`` tokens around each one (odd width; edges average what is there)."""
    if width < 1 or width % 2 == 0:
        raise InputError(f"pooling width must be odd and >= 1, got {width}")
    return F.avg_pool1d(signal[None], width, stride=1, padding=width // 2, count_include_pad=False)[0]


def max_salience(signal: Tensor) -> Tensor:
    """Maximum over KV heads, given to every one: ``[kv_heads, n]`` -> ``[kv_heads, n]`` with equal rows."""
    return signal.amax(dim=0, keepdim=True).expand_as(signal)


def key_norm(layer: PrefillLayer) -> Tensor:
    """L2 norm of each key: ``[kv_heads, n]``."""
    return layer.keys.float().norm(dim=-1)


def value_norm(layer: PrefillLayer) -> Tensor:
    """L2 norm of each value: ``[kv_heads, n]``."""
    return layer.values.float().norm(dim=-1)


SCALES = ("max", "mean", "rank")


def common_scale(signal: Tensor, how: str) -> Tensor:
    """Bring a signal of one layer to a scale that other signals share.

    ``max`` divides by the layer's maximum (in [0, 1], keeps contrast), ``mean`` by each head's mean (so heads
    weigh alike), ``rank`` takes each token's rank within its head (in [0, 1], ties share the earlier order).
    """
    tiny = torch.finfo(torch.float32).tiny
    if how == "max":
        return signal / signal.amax().clamp(min=tiny)
    if how == "mean":
        return signal / signal.mean(dim=-1, keepdim=True).clamp(min=tiny)
    if how == "rank":
        ranks = signal.sort(dim=-1, stable=True).indices.argsort(dim=-1)
        return ranks.float() / max(1, signal.shape[-1] - 1)
    raise InputError(f"scale {how!r} is unknown; use one of {SCALES}")


def check_window(n_tokens: int, window: int) -> None:
    """Refuse a window that the context does not exceed: a shrunk window is another policy under the same name."""
    if window < 1:
        raise InputError(f"window must be >= 1, got {window}")
    if n_tokens <= window:
        raise InputError(
            f"a context of {n_tokens} tokens is not longer than the observation window of {window}: "
            "use a longer context or a smaller window"
        )
