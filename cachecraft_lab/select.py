"""Scores + budget -> kept indices. Every policy at a ratio keeps the same number of KV pairs.

Indices are the contract between a policy and everything after it: int64 ``[kv_heads, budget]``, sorted,
unique, in range. Ties go to the earlier position; a NaN score is refused.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import InputError


def kept_count(n_tokens: int, ratio: float) -> int:
    """KV pairs that a head keeps of ``n_tokens`` at compression ratio ``ratio`` (fraction removed).

    ``max(1, floor(n * (1 - r) + 1e-9))``. The epsilon undoes floating point: 100 tokens at r = 0.9 keep 10, where
    a plain floor of ``100 * (1 - 0.9)`` keeps 9 (kvpress 0.5.5 keeps 9). The floor of 1 is kvpress's too.
    """
    check_ratio(ratio)
    if n_tokens < 1:
        raise InputError(f"a budget needs at least one token, got n_tokens={n_tokens}")
    return max(1, math.floor(n_tokens * (1 - ratio) + 1e-9))


def check_ratio(ratio: float) -> float:
    """Return ``ratio`` if it is a compression ratio, the fraction of KV pairs removed, in [0, 1)."""
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio < 1:
        raise InputError(f"compression ratio {ratio!r} is outside [0, 1): it is the fraction of KV pairs removed")
    return float(ratio)


def token_order(scores: Tensor) -> Tensor:
    """Positions by falling score, ties by position: int64 ``[kv_heads, n]``. NaN is refused, infinities are not."""
    _check(scores)
    return scores.sort(dim=-1, descending=True, stable=True).indices


def chunk_order(scores: Tensor, chunk_length: int, *, n_sink: int = 0, n_recent: int = 0) -> Tensor:
    """Positions chunk by chunk, best mean score first, and by score within a chunk (cf. ChunkKV, arXiv:2502.00299).

    Chunks are ``chunk_length`` tokens from position 0 on; the last may be shorter and is judged by the mean of what it
    has. Each head ranks its own chunks (give equal rows for a shared choice).

    Args:
        scores: ``[kv_heads, n]``; higher is kept.
        chunk_length: tokens a chunk; 1 is :func:`token_order`.
        n_sink, n_recent: first and last tokens that come before any chunk.
    """
    _check(scores)
    if chunk_length < 1:
        raise InputError(f"chunk_length must be >= 1, got {chunk_length}")
    n_tokens = scores.shape[-1]
    n_chunks = -(-n_tokens // chunk_length)
    # summed in float32 or better (bfloat16 would tie most chunks), and without atomics, so that a GPU repeats itself
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    sums = F.pad(wide, (0, n_chunks * chunk_length - n_tokens)).unflatten(-1, (n_chunks, chunk_length)).sum(-1)
    chunk_of = torch.arange(n_tokens, device=scores.device) // chunk_length
    means = sums / torch.bincount(chunk_of)
    rank = means.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)
    key = rank[:, chunk_of]
    key[:, :n_sink] = -1
    if n_recent:
        key[:, -n_recent:] = -1
    # lexicographic by two stable sorts: by score first, then by the rank of the chunk a token is in
    by_score = scores.sort(dim=-1, descending=True, stable=True).indices
    return by_score.gather(1, key.gather(1, by_score).sort(dim=-1, stable=True).indices)


def first(order: Tensor, budget: int) -> Tensor:
    """The first ``budget`` positions of an order, sorted: int64 ``[kv_heads, budget]``."""
    if not 1 <= budget <= order.shape[-1]:
        raise InputError(f"budget {budget} is outside 1..{order.shape[-1]}, the tokens that there are")
    return order[:, :budget].sort(dim=-1).values


def token_topk(scores: Tensor, budget: int) -> Tensor:
    """The ``budget`` best tokens of each head of ``scores [kv_heads, n]``: int64 ``[kv_heads, budget]``, sorted."""
    return first(token_order(scores), budget)


def chunk_topk(scores: Tensor, budget: int, chunk_length: int, *, n_sink: int = 0, n_recent: int = 0) -> Tensor:
    """Whole chunks by their mean score; of the one that no longer fits its best tokens: the budget is exact."""
    return first(chunk_order(scores, chunk_length, n_sink=n_sink, n_recent=n_recent), budget)


def check_kept(kept: Tensor, n_kv_heads: int, n_tokens: int, budget: int, *, who: str = "policy") -> Tensor:
    """Return ``kept`` if it keeps the contract of this module; else an error with what was expected and got."""
    expected = f"int64 [{n_kv_heads}, {budget}], sorted, unique, in [0, {n_tokens})"
    if not isinstance(kept, Tensor):
        raise InputError(f"{who}: kept indices must be a tensor {expected}; got {type(kept).__name__}")
    if kept.dtype != torch.int64 or tuple(kept.shape) != (n_kv_heads, budget):
        raise InputError(f"{who}: expected kept indices {expected}; got {kept.dtype} {list(kept.shape)}")
    if bool(((kept < 0) | (kept >= n_tokens)).any()):
        raise InputError(f"{who}: expected kept indices {expected}; got values {int(kept.min())}..{int(kept.max())}")
    if bool((kept.diff(dim=-1) <= 0).any()):
        raise InputError(f"{who}: expected kept indices {expected}; got unsorted or repeated positions")
    return kept


def _check(scores: Tensor) -> None:
    if scores.ndim != 2 or not scores.is_floating_point():
        raise InputError(f"scores must be floating point [kv_heads, n], got {scores.dtype} {list(scores.shape)}")
    if bool(scores.isnan().any()):
        raise InputError(
            f"scores hold {int(scores.isnan().sum())} NaN of {scores.numel()}: a policy must rank every token"
        )
