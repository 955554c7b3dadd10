"""Prompt ids -> Prefill: one forward pass gives the full KV cache and all that scorers read.

A prefill-stage eviction policy changes no hidden state of the prefill itself, so one pass serves every
policy at every compression ratio. What is captured is what an attention layer was given and left behind;
signals are computed from it later (``features.py``), and nothing downstream writes to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from kvpress.utils import get_prerope_query_states
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import rotate_half

from .errors import InputError
from .models import LoadedModel

CAPTURES = frozenset({"hidden_states", "attentions"})


@dataclass(frozen=True, eq=False)
class PrefillLayer:
    """One attention layer after prefill of ``n`` context tokens (batch of one, batch axis dropped).

    Attributes:
        index: layer number, from 0.
        module: the model's attention module (its projections turn hidden states into queries).
        keys, values: ``[kv_heads, n, head_dim]``, the full cache, keys after RoPE, in the model's dtype.
        cos, sin: ``[n, head_dim]``, the rotary embedding of the context's positions.
        hidden_states: ``[n, hidden]``, the layer's attention input; None unless captured.
        attentions: ``[heads, n, n]``, causal attention weights; None unless captured (eager kernel only).
        rotary_emb: the model's rotary module, for scorers that look at future positions.
        memo: signals that several policies share, kept while a layer is scored (see :meth:`remember`), each with its
            count of in-place changes when it was made.
    """

    index: int
    module: nn.Module
    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor
    hidden_states: Tensor | None
    attentions: Tensor | None
    rotary_emb: nn.Module
    memo: dict = field(default_factory=dict, repr=False)

    def remember(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """``compute()``, once a key: what one policy worked out serves the next. Dropped by ``memo.clear()``."""
        if key not in self.memo:
            value = compute()
            self.memo[key] = value, value._version
        return self.memo[key][0]

    @property
    def n_tokens(self) -> int:
        return self.keys.shape[1]

    @property
    def n_kv_heads(self) -> int:
        return self.keys.shape[0]

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.module.config.num_attention_heads // self.n_kv_heads

    def queries(self, start: int = 0) -> Tensor:
        """Queries of positions ``start..n`` after Q-norm (Qwen3) and RoPE: ``[heads, n - start, head_dim]``.

        Raises:
            InputError: hidden states were not captured.
        """
        if self.hidden_states is None:
            raise InputError("this prefill holds no hidden states: call prefill(..., capture={'hidden_states'})")
        query = get_prerope_query_states(self.module, self.hidden_states[None, start:])[0]
        cos, sin = self.cos[start:], self.sin[start:]
        return query * cos + rotate_half(query) * sin


@dataclass(frozen=True, eq=False)
class Prefill:
    """What one pass over the context leaves behind; shared by every policy and ratio.

    Attributes:
        lm: the model that made it.
        layers: one :class:`PrefillLayer` a layer.
        forward_passes: forward calls it took (1, or the number of chunks).
        seconds: wall time of the pass.
    """

    lm: LoadedModel
    layers: tuple[PrefillLayer, ...]
    forward_passes: int
    seconds: float

    @property
    def n_tokens(self) -> int:
        return self.layers[0].n_tokens

    @property
    def nbytes(self) -> int:
        """Size of the full KV cache in bytes."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in (layer.keys, layer.values))

    def __repr__(self) -> str:
        return f"Prefill({self.lm.name}, {self.n_tokens} tokens, KV cache {self.nbytes / 2**20:.1f} MiB)"


@torch.no_grad()
def prefill(
    lm: LoadedModel,
    context_ids: Tensor,
    *,
    capture: frozenset[str] | set[str] = frozenset({"hidden_states"}),
    chunk_size: int | None = None,
) -> Prefill:
    """Run the context through the model once.

    Args:
        lm: the model.
        context_ids: int64 ``[1, n]``.
        capture: what scorers will ask for beside keys and values: ``hidden_states`` (``n * hidden`` numbers a
            layer) and ``attentions`` (``heads * n * n`` a layer, so short contexts only).
        chunk_size: tokens a forward call; None takes the context whole. Chunks bound the peak memory of a long
            prefill and change nothing else: later chunks attend to the whole, uncompressed cache.

    Raises:
        InputError: empty or too long a context; attention weights asked of a kernel that has none.
    """
    if context_ids.ndim != 2 or context_ids.shape[0] != 1 or context_ids.shape[1] == 0:
        raise InputError(f"context_ids must be [1, n] with n >= 1, got {list(context_ids.shape)}")
    if unknown := set(capture) - CAPTURES:
        raise InputError(f"cannot capture {sorted(unknown)}; known: {sorted(CAPTURES)}")
    check_attentions(lm, capture)
    n_tokens = context_ids.shape[1]
    lm.check_length(n_tokens)
    if chunk_size is not None and (chunk_size < 1 or "attentions" in capture):
        raise InputError("chunk_size must be >= 1, and attention weights need the context whole (chunk_size=None)")

    context_ids = context_ids.to(lm.device)
    cache = DynamicCache()
    started = time.perf_counter()
    with _capturing(lm.model, capture) as captured:
        for chunk in context_ids.split(chunk_size or n_tokens, dim=1):
            lm.model.model(input_ids=chunk, past_key_values=cache, use_cache=True)
    if context_ids.is_cuda:
        torch.cuda.synchronize()  # or its time would be counted as scoring
    seconds = time.perf_counter() - started

    layers = []
    for index, (block, kept) in enumerate(zip(lm.model.model.layers, captured, strict=True)):
        layers.append(
            PrefillLayer(
                index=index,
                module=block.self_attn,
                keys=cache.layers[index].keys[0],
                values=cache.layers[index].values[0],
                cos=torch.cat(kept["cos"])[:n_tokens],
                sin=torch.cat(kept["sin"])[:n_tokens],
                hidden_states=torch.cat(kept["hidden_states"]) if kept["hidden_states"] else None,
                attentions=kept["attentions"][0] if kept["attentions"] else None,
                rotary_emb=lm.model.model.rotary_emb,
            )
        )
    return Prefill(lm, tuple(layers), forward_passes=-(-n_tokens // (chunk_size or n_tokens)), seconds=seconds)


def check_attentions(lm: LoadedModel, capture: frozenset[str] | set[str]) -> None:
    """Refuse attention weights of a kernel that never forms them: a silent fallback would change the scores."""
    if "attentions" in capture and lm.attn_implementation != "eager":
        raise InputError(
            f"attention weights need the eager kernel, this model runs {lm.attn_implementation}: "
            "load_model(..., attn_implementation='eager')"
        )


class _capturing:
    """Context manager: hooks on every attention layer that keep what it was given (references, no copies)."""

    def __init__(self, model: nn.Module, capture: frozenset[str] | set[str]) -> None:
        self.modules = [block.self_attn for block in model.model.layers]
        self.capture = capture
        self.captured = [{"hidden_states": [], "attentions": [], "cos": [], "sin": []} for _ in self.modules]

    def __enter__(self) -> list[dict[str, list[Tensor]]]:
        self.hooks = [
            module.register_forward_hook(self._hook(kept), with_kwargs=True)
            for module, kept in zip(self.modules, self.captured, strict=True)
        ]
        return self.captured

    def __exit__(self, *exc: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _hook(self, kept: dict[str, list[Tensor]]):
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
            cos, sin = kwargs["position_embeddings"]
            kept["cos"].append(cos[0])
            kept["sin"].append(sin[0])
            if "hidden_states" in self.capture:
                kept["hidden_states"].append(kwargs["hidden_states"][0])
            if "attentions" in self.capture:
                kept["attentions"].append(output[1][0])

        return hook
