"""kvpress's presses as policies: the library's own ``score``, our exact budget.

A press runs here if its scores are a function of what one prefill leaves behind. Where kvpress's kept count
differs (it floors without an epsilon, ChunkKV rounds to whole chunks, PyramidKV rounds a layer at a time) ours is
the common budget; see README, "How it differs from kvpress".
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import kvpress
import torch
from kvpress.presses.scorer_press import ScorerPress
from torch import Tensor

from ..errors import InputError
from ..features import attention_rows
from ..prefill import Prefill, PrefillLayer
from ..select import chunk_order, kept_count
from .base import Policy, check_context, keep_layer, make_policy, register_policy

HIDDEN = frozenset({"hidden_states"})


def press_score(press: ScorerPress, layer: PrefillLayer, attentions: Tensor | None = None) -> Tensor:
    """``press.score`` on a captured layer, batch axis added and dropped: ``[kv_heads, n]``.

    ``attentions`` are rows of the attention matrix ``[heads, rows, n]`` for a press that looks at the last ones.
    """
    if not hasattr(layer.module, "rotary_emb"):  # kvpress attaches it too; expected attention reads it
        layer.module.rotary_emb = layer.rotary_emb
    hidden = layer.hidden_states
    if hidden is None:  # a press that never reads it still gets the right length
        hidden = layer.keys.new_empty(layer.n_tokens, 0)
    attentions = layer.attentions if attentions is None else attentions.to(layer.keys.dtype)
    return press.score(
        layer.module,
        hidden[None],
        layer.keys[None],
        layer.values[None],
        None if attentions is None else attentions[None],
        {"position_embeddings": (layer.cos[None], layer.sin[None])},
    )[0]


@dataclass(frozen=True)
class PressPolicy(Policy):
    """Base of the adapters: ``press(ratio)`` builds kvpress's object, fresh for every layer and ratio."""

    def press(self, ratio: float) -> ScorerPress:
        raise NotImplementedError

    def score(self, layer: PrefillLayer, ratio: float) -> Tensor:
        return press_score(self.press(ratio), layer)


@register_policy("random")
@dataclass(frozen=True)
class Random(PressPolicy):
    """Random scores from a seed, other ones in every layer: the floor that a policy has to beat."""

    seed: int = 0
    name = "random"

    def score(self, layer: PrefillLayer, ratio: float) -> Tensor:
        return press_score(kvpress.RandomPress(ratio, seed=self.seed + layer.index), layer)


@register_policy("knorm")
@dataclass(frozen=True)
class KNorm(PressPolicy):
    """Keys of small L2 norm are kept."""

    name = "knorm"
    paper = "arXiv:2406.11430"

    def press(self, ratio: float) -> ScorerPress:
        return kvpress.KnormPress(ratio)


@register_policy("streaming_llm")
@dataclass(frozen=True)
class StreamingLLM(PressPolicy):
    """The first ``n_sink`` tokens and the most recent ones."""

    n_sink: int = 4
    name = "streaming_llm"
    ratio_in_score = True
    paper = "arXiv:2309.17453"

    @property
    def min_tokens(self) -> int:
        return self.n_sink + 1

    def score(self, layer: PrefillLayer, ratio: float) -> Tensor:
        # kvpress rounds the count of recent tokens down from the ratio: give it one that means our budget, or the
        # pair that it would miss is the earliest of the middle
        n = layer.n_tokens
        exact = max(0.0, 1 - (kept_count(n, ratio) + 0.5) / n)
        return press_score(kvpress.StreamingLLMPress(exact, n_sink=self.n_sink), layer)


@register_policy("snapkv")
@dataclass(frozen=True)
class SnapKV(PressPolicy):
    """Attention from the last ``window_size`` queries, pooled over ``kernel_size`` neighbours."""

    window_size: int = 64
    kernel_size: int = 5
    name = "snapkv"
    needs = HIDDEN
    paper = "arXiv:2404.14469"

    @property
    def min_tokens(self) -> int:
        return self.window_size + 1

    def press(self, ratio: float) -> ScorerPress:
        return kvpress.SnapKVPress(ratio, window_size=self.window_size, kernel_size=self.kernel_size)

    def score(self, layer: PrefillLayer, ratio: float) -> Tensor:
        # the press takes attention rows if there are any: so the window's are formed once for all of its family
        return press_score(self.press(ratio), layer, attention_rows(layer, self.window_size))


@register_policy("tova")
@dataclass(frozen=True)
class TOVA(PressPolicy):
    """Attention from the last token, mean over heads, shared by all."""

    name = "tova"
    needs = HIDDEN
    paper = "arXiv:2401.06104"

    @property
    def min_tokens(self) -> int:
        return 2

    def press(self, ratio: float) -> ScorerPress:
        return kvpress.TOVAPress(ratio)

    def score(self, layer: PrefillLayer, ratio: float) -> Tensor:
        return press_score(self.press(ratio), layer, attention_rows(layer, 1))


@register_policy("keydiff")
@dataclass(frozen=True)
class KeyDiff(PressPolicy):
    """Keys unlike the mean key are kept."""

    name = "keydiff"
    paper = "arXiv:2504.15364"

    def press(self, ratio: float) -> ScorerPress:
        return kvpress.KeyDiffPress(ratio)


@register_policy("lagkv")
@dataclass(frozen=True)
class LagKV(PressPolicy):
    """Keys and values judged against the next partition of ``lag_size`` tokens."""

    n_sink: int = 4
    lag_size: int = 128
    name = "lagkv"
    paper = "arXiv:2504.04704"

    @property
    def min_tokens(self) -> int:
        return self.n_sink + 2 * self.lag_size  # below, kvpress scores by position alone

    def press(self, ratio: float) -> ScorerPress:
        return kvpress.LagKVPress(ratio, n_sink=self.n_sink, lag_size=self.lag_size)


class _ExpectedAttention(kvpress.ExpectedAttentionPress):
    """kvpress's score, with the average rotation formed as the diagonal bands that it is: the library builds a
    ``[positions, head_dim, head_dim]`` tensor for it in every layer, which costs half a prefill at 512 tokens."""

    def apply_avg_rope(self, module, mu, cov, q_len):  # kvpress's signature
        positions = torch.arange(q_len, q_len + self.n_future_positions, device=mu.device)[None]
        cos, sin = (table[0].mean(dim=0) for table in module.rotary_emb(mu, positions))
        half = module.head_dim // 2
        rotation = torch.diag(cos)
        rotation[:half, half:] -= torch.diag(sin[half:])
        rotation[half:, :half] += torch.diag(sin[:half])
        mu = mu @ rotation.T
        return mu, None if cov is None else rotation @ cov @ rotation.T


@register_policy("expected_attention")
@dataclass(frozen=True)
class ExpectedAttention(PressPolicy):
    """Attention expected from future queries, modelled as a Gaussian, times the value norm."""

    n_future_positions: int = 512
    n_sink: int = 4
    name = "expected_attention"
    needs = HIDDEN
    paper = "arXiv:2510.00636"

    @property
    def min_tokens(self) -> int:
        return self.n_sink + 2

    def press(self, ratio: float) -> ScorerPress:
        return _ExpectedAttention(ratio, n_future_positions=self.n_future_positions, n_sink=self.n_sink)


@register_policy("observed_attention")
@dataclass(frozen=True)
class ObservedAttention(PressPolicy):
    """Mean attention that a key received in the whole prefill (H2O). Eager kernel only; memory O(n * n)."""

    name = "observed_attention"
    needs = frozenset({"attentions"})
    paper = "arXiv:2306.14048"

    def press(self, ratio: float) -> ScorerPress:
        return kvpress.ObservedAttentionPress(ratio)


@register_policy("pyramidkv")
@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's scores with more budget in low layers than in high ones; the total is the common one.

    Layer budgets are kvpress's own (which fall back to equal ones when the pyramid's tip would be smaller than the
    window), moved by at most a few pairs a layer so that they sum exactly.
    """

    beta: int = 20
    name = "pyramidkv"
    paper = "arXiv:2406.02069"

    def layer_budgets(self, prefill: Prefill, ratio: float) -> list[int]:
        n, n_layers = prefill.n_tokens, len(prefill.layers)
        press = kvpress.PyramidKVPress(
            ratio, window_size=self.window_size, kernel_size=self.kernel_size, beta=self.beta
        )
        wished = [press.get_layer_budget(layer.module, n) for layer in prefill.layers]
        return spread(wished, total=kept_count(n, ratio) * n_layers, high=n)


def spread(wished: list[int], *, total: int, high: int) -> list[int]:
    """``wished`` moved one by one, lowest layer first, until it sums to ``total`` with every entry in 1..high."""
    budgets = [min(max(1, b), high) for b in wished]
    step = 1 if sum(budgets) < total else -1
    while sum(budgets) != total:
        for i, b in enumerate(budgets):
            if sum(budgets) != total and 1 <= b + step <= high:
                budgets[i] += step
    return budgets


@register_policy("chunkkv")
@dataclass(frozen=True)
class ChunkKV(SnapKV):
    """SnapKV's scores summed over KV heads, whole chunks kept by their mean, the last one cut to the budget."""

    chunk_length: int = 20
    name = "chunkkv"
    paper = "arXiv:2502.00299"

    def score(self, layer: PrefillLayer, ratio: float) -> Tensor:
        scores = super().score(layer, ratio).float()
        return scores.sum(dim=0, keepdim=True).expand_as(scores)

    def rank(self, scores: Tensor) -> Tensor:
        return chunk_order(scores, self.chunk_length)


_REFUSED = {
    "KVzipPress": "it needs further passes over the context",
    "FastKVzipPress": "it needs a trained gate",
    "KVzapPress": "it needs a trained surrogate",
    "KVComposePress": "it needs further passes over the context",
    "KVgradPress": "it needs gradients",
    "DuoAttentionPress": "it needs trained head patterns",
    "QFilterPress": "it needs trained filters",
    "ExpectedAttentionStatsPress": "it needs trained query statistics",
    "AdaKVPress": "it gives heads budgets of their own, masked and not removed",
    "CriticalAdaKVPress": "it gives heads budgets of their own, masked and not removed",
    "CriticalKVPress": "its scores mark a part of the budget of the press that it wraps",
    "DMSPress": "it gives heads budgets of their own, masked and not removed",
    "SimLayerKVPress": "its layers keep all or a window, so the budget is not the common one",
    "ThinKPress": "it removes channels, not KV pairs",
    "FinchPress": "it re-rotates keys and splits the prompt at a delimiter",
    "KeyRerotationPress": "it re-rotates keys; kept keys stay as they are here",
    "DecodingPress": "it compresses while decoding",
    "PrefillDecodingPress": "it compresses while decoding",
    "CAMPress": "it merges KV pairs, so kept indices do not describe it",
    "MergingPress": "it merges KV pairs, so kept indices do not describe it",
}


@dataclass(frozen=True)
class WrappedPress(PressPolicy):
    """Any kvpress ``ScorerPress`` object as a policy; made by :func:`from_press`.

    A press that draws random numbers (a sketch, a projection) draws the same ones every time.
    """

    original: ScorerPress
    label: str
    ratio_in_score = True  # unknown, so never assumed away

    @property
    def name(self) -> str:
        return self.label

    @property
    def needs(self) -> frozenset:
        return frozenset({"attentions"}) if isinstance(self.original, kvpress.ObservedAttentionPress) else HIDDEN

    @property
    def min_tokens(self) -> int:
        press = self.original
        n_sink = getattr(press, "n_sink", 0)
        return max(getattr(press, "window_size", 0) + 1, n_sink + 1, n_sink + 2 * getattr(press, "lag_size", 0))

    def score(self, layer: PrefillLayer, ratio: float) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(layer.index)
            return super().score(layer, ratio)

    def press(self, ratio: float) -> ScorerPress:
        return dataclasses.replace(self.original, compression_ratio=ratio)

    def params(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self.original)
        fields.pop("compression_ratio", None)
        return {"press": type(self.original).__name__, **fields}


def from_press(press: object, name: str | None = None) -> Policy:
    """Any kvpress ``ScorerPress`` whose scores one prefill can give, as a policy with the common budget.

    Raises:
        InputError: a press that cannot run on captured tensors, with the reason.
    """
    kind = type(press).__name__
    if kind in _REFUSED:
        raise InputError(f"{kind} cannot run on one prefill's tensors: {_REFUSED[kind]}")
    if type(press) is kvpress.PyramidKVPress:
        return PyramidKV(press.window_size, press.kernel_size, press.beta)
    if type(press) is kvpress.ChunkKVPress and type(press.press) is kvpress.SnapKVPress:
        return ChunkKV(press.press.window_size, press.press.kernel_size, press.chunk_length)
    if not isinstance(press, ScorerPress) or type(press).compress is not ScorerPress.compress:
        raise InputError(f"{kind} cannot run on one prefill's tensors: it is no ScorerPress with plain top-k selection")
    return WrappedPress(press, name or kind)


@dataclass
class PolicyPress(kvpress.presses.base_press.BasePress):
    """A policy of this package as a kvpress press, for kvpress's own pipeline: same kept indices, same answers.

    Attributes:
        policy: name, settings or object, as :func:`make_policy` takes it; its layers must have equal budgets.
        compression_ratio: the fraction of KV pairs removed.
    """

    policy: Any
    compression_ratio: float = 0.0

    def __post_init__(self) -> None:
        self.policy = make_policy(self.policy)
        if type(self.policy).layer_budgets is not Policy.layer_budgets:
            raise InputError(
                f"policy {self.policy.name} gives layers budgets of their own: a press sees one layer only"
            )

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):  # kvpress's signature
        if self.compression_ratio == 0:
            return keys, values
        check_context(self.policy, keys.shape[2], "this one")
        cos, sin = kwargs["position_embeddings"]
        layer = PrefillLayer(
            index=module.layer_idx,
            module=module,
            keys=keys[0],
            values=values[0],
            cos=cos[0],
            sin=sin[0],
            hidden_states=hidden_states[0],
            attentions=None if attentions is None else attentions[0],
            rotary_emb=module.rotary_emb,
        )
        budget = kept_count(layer.n_tokens, self.compression_ratio)
        kept = keep_layer(self.policy, layer, {self.compression_ratio: budget})[self.compression_ratio]
        index = kept[None, ..., None].expand(-1, -1, -1, keys.shape[-1])
        return keys.gather(2, index), values.gather(2, index)


def check_kvpress() -> None:
    """Stop if this kvpress and transformers do not work together: K-norm at r = 0.5 must keep half in each layer."""
    import transformers
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with torch.random.fork_rng():
        model = LlamaForCausalLM(config).eval()
    cache = DynamicCache()
    try:
        with torch.no_grad(), kvpress.KnormPress(0.5)(model):
            model.model(input_ids=torch.zeros(1, 64, dtype=torch.int64), past_key_values=cache)
        kept = f"kept {[layer.keys.shape[2] for layer in cache.layers]} of 64"
    except Exception as error:  # whatever a changed cache makes of it
        kept = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
    if kept != "kept [32, 32] of 64":
        raise InputError(
            f"kvpress {version('kvpress')} and transformers {transformers.__version__} do not work together: K-norm at "
            f"r=0.5 {kept}; install the pinned versions (constraints.txt)"
        )
