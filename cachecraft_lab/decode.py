"""Greedy decoding of one question from many compressed caches at once.

Rows are (policy, ratio) pairs of one sample. The weights are read once a step for all of them, and attention runs
group by group, rows of one kept length together, so there is no padding and no mask over kept pairs. A row's kept
pairs are gathered when its block is decoded, never before: what grows with the number of policies is indices.

Attention goes through transformers' own registry of kernels under the name ``cachecraft_ragged``; the model's code
runs as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from .compress import check, compress, gather, kept_bytes
from .errors import InputError
from .models import LoadedModel
from .policies.base import Kept
from .prefill import Prefill

KERNEL = "cachecraft_ragged"


@dataclass(frozen=True)
class Generation:
    """One answer.

    Attributes:
        token_ids: new tokens, the EOS that ended them included.
        finish_reason: ``eos``, or ``length`` if max_new_tokens cut it off.
        margins: gap between the best and the second-best logit at each token; a tiny one is a greedy tie.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    margins: tuple[float, ...] = field(default=(), repr=False)


@dataclass
class DecodeStats:
    """What a decode cost, for manifests and benchmarks."""

    forward_passes: int = 0
    rows: int = 0
    decoded_rows: int = 0
    peak_cache_bytes: int = 0


@torch.no_grad()
def decode(
    prefill: Prefill,
    question_ids: Tensor,
    kept: Sequence[Kept],
    max_new_tokens: int,
    *,
    memory_budget: int = 2 * 2**30,
    stats: DecodeStats | None = None,
) -> list[Generation]:
    """Answer the question from each compressed cache: the tokens are those of decoding one by one.

    Args:
        prefill: the full cache that ``kept`` points into.
        question_ids: int64 ``[1, q]``, q >= 1; the first has position ``prefill.n_tokens`` whatever was evicted.
        kept: kept indices of each row; equal ones are decoded once.
        max_new_tokens: at most so many tokens a row; a row ends at any of the model's EOS ids.
        memory_budget: bytes that gathered caches may take at a time; rows are decoded in blocks that fit.
        stats: filled with what it cost.

    Returns:
        One :class:`Generation` a row, in the order of ``kept``.
    """
    _check_question(prefill, question_ids, max_new_tokens)
    for row in kept:
        check(prefill, row)
    stats = stats if stats is not None else DecodeStats()
    unique, row_of = _distinct(kept)
    stats.rows += len(kept)
    stats.decoded_rows += len(unique)
    # rows of equal layer lengths lie side by side, so that a group is a slice
    order = sorted(range(len(unique)), key=lambda i: _lengths(unique[i]))
    answers: dict[int, Generation] = {}
    for block in _blocks(prefill, unique, order, question_ids.shape[1] + max_new_tokens, memory_budget):
        rows = [unique[i] for i in block]
        answers.update(zip(block, _decode_block(prefill, question_ids, rows, max_new_tokens, stats), strict=True))
    return [answers[i] for i in row_of]


@torch.no_grad()
def decode_one(prefill: Prefill, question_ids: Tensor, kept: Kept, max_new_tokens: int) -> Generation:
    """The slow, plain path: one ``DynamicCache``, the model's own kernel, one row. What ``decode`` must equal.

    Layers must keep equal counts, as transformers builds one mask for all of them.
    """
    _check_question(prefill, question_ids, max_new_tokens)
    lm = prefill.lm
    cache, ids, position = compress(prefill, kept), question_ids.to(lm.device), prefill.n_tokens
    tokens, margins = [], []
    while True:
        positions = torch.arange(position, position + ids.shape[1], device=lm.device)[None]
        logits = lm.model(input_ids=ids, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits[0, -1]
        token, margin = _pick(logits[None])
        tokens.append(int(token))
        margins.append(float(margin))
        if tokens[-1] in lm.eos_ids or len(tokens) == max_new_tokens:
            reason = "eos" if tokens[-1] in lm.eos_ids else "length"
            return Generation(tuple(tokens), reason, tuple(margins))
        position += ids.shape[1]
        ids = token[None]


def _check_question(prefill: Prefill, question_ids: Tensor, max_new_tokens: int) -> None:
    if question_ids.ndim != 2 or question_ids.shape[0] != 1 or question_ids.shape[1] == 0:
        raise InputError(f"question_ids must be [1, q] with q >= 1, got {list(question_ids.shape)}")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    prefill.lm.check_length(prefill.n_tokens + question_ids.shape[1] + max_new_tokens)


def _lengths(kept: Kept) -> tuple[int, ...]:
    return tuple(indices.shape[-1] for indices in kept)


def _distinct(kept: Sequence[Kept]) -> tuple[list[Kept], list[int]]:
    """Rows without repeats, and for each given row its place among them."""
    unique: list[Kept] = []
    row_of = []
    for row in kept:
        for i, other in enumerate(unique):
            if _lengths(row) == _lengths(other) and all(map(torch.equal, row, other)):
                row_of.append(i)
                break
        else:
            row_of.append(len(unique))
            unique.append(row)
    return unique, row_of


def _blocks(
    prefill: Prefill, rows: Sequence[Kept], order: Sequence[int], n_new: int, memory_budget: int
) -> Iterator[list[int]]:
    """Consecutive rows of ``order`` whose gathered caches fit the budget together (at least one a block)."""
    new_bytes = prefill.nbytes // prefill.n_tokens * n_new
    block: list[int] = []
    used = 0
    for i in order:
        size = kept_bytes(prefill, rows[i]) + new_bytes
        if block and used + size > memory_budget:
            yield block
            block, used = [], 0
        block.append(i)
        used += size
    if block:
        yield block


def _decode_block(
    prefill: Prefill, question_ids: Tensor, rows: list[Kept], max_new_tokens: int, stats: DecodeStats
) -> list[Generation]:
    lm = prefill.lm
    cache = RaggedCache(prefill, rows, question_ids.shape[1] + max_new_tokens)
    stats.peak_cache_bytes = max(stats.peak_cache_bytes, cache.nbytes)
    eos = torch.tensor(lm.eos_ids, device=lm.device)
    alive = torch.arange(len(rows), device=lm.device)
    ids = question_ids.to(lm.device).expand(len(rows), -1)
    tokens = torch.zeros(len(rows), max_new_tokens, dtype=torch.int64, device=lm.device)
    margins = torch.zeros(len(rows), max_new_tokens, device=lm.device)
    n_tokens = torch.full((len(rows),), max_new_tokens, device=lm.device)
    ended = torch.zeros(len(rows), dtype=torch.bool, device=lm.device)
    position = prefill.n_tokens
    with ragged_kernel(lm):
        for step in range(max_new_tokens):
            logits = forward(lm, cache, ids, position)[:, -1]
            stats.forward_passes += 1
            position += ids.shape[1]
            token, margin = _pick(logits)
            tokens[alive, step] = token
            margins[alive, step] = margin
            done = torch.isin(token, eos)
            if bool(done.any()):
                ended[alive[done]] = True
                n_tokens[alive[done]] = step + 1
                going = (~done).nonzero()[:, 0]
                if len(going) == 0:
                    break
                cache.take(going)
                alive, token = alive[going], token[going]
            ids = token[:, None]
    return [
        Generation(tuple(ids_[:n]), "eos" if end else "length", tuple(gaps[:n]))
        for ids_, gaps, n, end in zip(tokens.tolist(), margins.tolist(), n_tokens.tolist(), ended.tolist(), strict=True)
    ]


def forward(lm: LoadedModel, cache: RaggedCache, ids: Tensor, position: int, n_logits: int = 1) -> Tensor:
    """Logits ``[rows, n_logits, vocab]`` of the last tokens of ``ids [rows, s]``; appends their pairs to the cache.

    Call it inside :func:`ragged_kernel`.
    """
    positions = torch.arange(position, position + ids.shape[1], device=lm.device).expand(ids.shape[0], -1)
    out = lm.model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=n_logits, ragged_cache=cache)
    cache.length += ids.shape[1]
    return out.logits


def _pick(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy token and its margin a row; non-finite logits stop the run, since argmax would make them an answer."""
    if not bool(torch.isfinite(logits).all()):
        raise FloatingPointError("non-finite logits while decoding: no score is given (try bfloat16 or float32)")
    best = logits.float().topk(min(2, logits.shape[-1]), dim=-1)
    return logits.argmax(dim=-1), best.values[:, 0] - best.values[:, -1]


class RaggedCache:
    """Gathered KV pairs of many rows, and room for the question and the answer behind them.

    Rows with the same kept count in every layer form a group: one preallocated tensor a layer and group,
    ``[rows, kv_heads, kept + n_new, head_dim]``, written in place step by step.
    """

    def __init__(self, prefill: Prefill, rows: list[Kept], n_new: int) -> None:
        self.length = 0  # tokens appended behind the kept pairs so far
        self.groups: list[slice] = []
        starts = [i for i in range(len(rows)) if i == 0 or _lengths(rows[i]) != _lengths(rows[i - 1])]
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
            self.groups.append(slice(start, stop))
        self.kept = [_lengths(rows[group.start]) for group in self.groups]
        self.keys = [self._fill(prefill, rows, n_new, "keys", i) for i in range(len(prefill.layers))]
        self.values = [self._fill(prefill, rows, n_new, "values", i) for i in range(len(prefill.layers))]

    def _fill(self, prefill: Prefill, rows: list[Kept], n_new: int, name: str, index: int) -> list[Tensor]:
        states = getattr(prefill.layers[index], name)
        buffers = []
        for group, kept in zip(self.groups, self.kept, strict=True):
            shape = (group.stop - group.start, states.shape[0], kept[index] + n_new, states.shape[2])
            buffer = states.new_empty(shape)
            for i, row in enumerate(rows[group]):
                buffer[i, :, : kept[index]] = gather(states, row[index])
            buffers.append(buffer)
        return buffers

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in [*self.keys, *self.values] for t in layer)

    def take(self, rows: Tensor) -> None:
        """Keep only these rows (sorted); a group that loses none is left as it is, one that loses all goes."""
        members = [rows[(rows >= g.start) & (rows < g.stop)] - g.start for g in self.groups]
        sizes = [g.stop - g.start for g in self.groups]
        stay = [i for i, m in enumerate(members) if len(m)]
        for states in (self.keys, self.values):
            for layer in states:
                layer[:] = [
                    layer[i] if len(members[i]) == sizes[i] else layer[i][members[i].to(layer[i].device)] for i in stay
                ]
        self.kept = [self.kept[i] for i in stay]
        self.groups = []
        for i in stay:
            start = self.groups[-1].stop if self.groups else 0
            self.groups.append(slice(start, start + len(members[i])))

    def append(self, layer: int, group: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write new pairs ``[rows, kv_heads, s, head_dim]`` behind the group's; return all of its pairs so far."""
        start = self.kept[group][layer] + self.length
        stop = start + keys.shape[2]
        for buffer, new in ((self.keys[layer][group], keys), (self.values[layer][group], values)):
            buffer[:, :, start:stop] = new
        return self.keys[layer][group][:, :, :stop], self.values[layer][group][:, :, :stop]


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ragged_cache: RaggedCache,
    scaling: float,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention kernel over a :class:`RaggedCache`: new tokens see all kept pairs, and causally each other.

    Query heads of one KV head ride along the query axis, so grouped keys are never repeated in memory.

    Args:
        query: ``[rows, heads, s, head_dim]``; key, value: the new pairs ``[rows, kv_heads, s, head_dim]``.

    Returns:
        ``[rows, s, heads, head_dim]`` and None for the weights.
    """
    rows, heads, s, dim = query.shape
    kv_heads = key.shape[1]
    query = query.reshape(rows, kv_heads, heads // kv_heads * s, dim)
    out = torch.empty_like(query)
    for i, group in enumerate(ragged_cache.groups):
        keys, values = ragged_cache.append(module.layer_idx, i, key[group], value[group])
        mask = None
        if s > 1:
            mask = query.new_ones(s, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - s)
            mask = mask.repeat(heads // kv_heads, 1)
        out[group] = F.scaled_dot_product_attention(query[group], keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(rows, heads, s, dim).transpose(1, 2), None


AttentionInterface.register(KERNEL, ragged_attention)


@contextmanager
def ragged_kernel(lm: LoadedModel) -> Iterator[None]:
    """The model attends through :func:`ragged_attention` inside, and as before outside, also after an error."""
    before = lm.model.config._attn_implementation
    lm.model.config._attn_implementation = KERNEL
    try:
        yield
    finally:
        lm.model.config._attn_implementation = before
