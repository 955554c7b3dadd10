"""What an eviction policy is, and the registry of names.

A policy gives each layer's KV pairs a score and turns scores into kept indices. It sees one
:class:`~cachecraft_lab.prefill.PrefillLayer` at a time, changes nothing, and returns indices only.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, check_known
from ..prefill import Prefill, PrefillLayer
from ..select import check_kept, first, kept_count, token_order

Kept = tuple[Tensor, ...]
"""Kept indices of a whole model: a layer an entry, int64 ``[kv_heads, kept]``, sorted and unique."""


@dataclass(frozen=True)
class Policy:
    """Base of all policies. Subclass and give ``score``; the rest has defaults that suit most.

    Attributes of the class:
        name: the registered name; goes into every record.
        needs: what prefill must capture beside keys and values (``hidden_states``, ``attentions``).
        ratio_in_score: True if the score depends on the ratio (StreamingLLM); else it is computed once for all.
        paper: where the method was published.
    """

    name = "policy"
    needs = frozenset()
    ratio_in_score = False
    paper = ""

    @property
    def min_tokens(self) -> int:
        """Shortest context that the policy can judge."""
        return 1

    def score(self, layer: PrefillLayer, ratio: float) -> Tensor:
        """Scores ``[kv_heads, n]`` of one layer's KV pairs, floating point without NaN; higher is kept."""
        raise NotImplementedError

    def rank(self, scores: Tensor) -> Tensor:
        """Positions ``[kv_heads, n]`` in the order in which they are kept: a budget takes a prefix. By score."""
        return token_order(scores)

    def select(self, scores: Tensor, budget: int) -> Tensor:
        """Kept indices ``[kv_heads, budget]``; override it only where a larger budget does not keep a superset."""
        return first(self.rank(scores), budget)

    def layer_budgets(self, prefill: Prefill, ratio: float) -> list[int]:
        """KV pairs a head keeps in each layer; the same in all unless a policy says otherwise. The sum is fixed."""
        return [kept_count(prefill.n_tokens, ratio)] * len(prefill.layers)

    def params(self) -> dict[str, Any]:
        """Settings as plain values, for records: two runs with equal name and params are the same policy."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def identity(self) -> dict[str, Any]:
        """Name, params, and the source of a class from outside this package: what a run's folder is keyed by."""
        known = {"name": self.name, **self.params()}
        if not type(self).__module__.startswith(f"{__package__}."):
            classes = [c for c in type(self).__mro__ if not c.__module__.startswith((f"{__package__}.", "builtins"))]
            known["source"] = "\n".join(map(_source, classes))
        return known


def _source(thing: Any) -> str:
    """Source of a function, or of a class method by method: a notebook's classes have no source of their own."""
    if isinstance(thing, type):
        members = [getattr(member, "fget", member) for member in vars(thing).values()]
        return "\n".join(_source(member) for member in members if inspect.isfunction(member))
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        code = getattr(thing, "__code__", None)
        return repr((code.co_code, code.co_consts, code.co_names)) if code else repr(thing)


def keep(policy: Policy, prefill: Prefill, ratios: Iterable[float]) -> dict[float, Kept]:
    """Kept indices of one policy at every ratio, over one prefill; see :func:`keep_all`."""
    return keep_all([policy], prefill, ratios)[0]


def keep_all(policies: Sequence[Policy], prefill: Prefill, ratios: Iterable[float]) -> list[dict[float, Kept]]:
    """Kept indices of every policy at every ratio, over one prefill.

    Layer by layer, so that what policies share of a layer is worked out once and then dropped.

    Raises:
        InputError: too short a context; or a policy broke its contract (shape, dtype, order, range, budget, NaN,
            a tensor changed in place), with what was expected and got.
    """
    ratios = list(ratios)
    budgets = []
    for policy in policies:
        check_context(policy, prefill.n_tokens, "this prefill")
        budgets.append({ratio: check_budgets(policy, prefill, ratio) for ratio in ratios})
    kept: list[dict[float, list[Tensor]]] = [{ratio: [] for ratio in ratios} for _ in policies]
    with torch.no_grad():
        for layer in prefill.layers:
            for i, policy in enumerate(policies):
                here = {ratio: budgets[i][ratio][layer.index] for ratio in ratios}
                for ratio, indices in keep_layer(policy, layer, here).items():
                    kept[i][ratio].append(indices)
            layer.memo.clear()
    return [{ratio: tuple(layers) for ratio, layers in found.items()} for found in kept]


def keep_layer(policy: Policy, layer: PrefillLayer, budgets: dict[float, int]) -> dict[float, Tensor]:
    """Kept indices ``[kv_heads, budget]`` of one layer at each ratio; scored once unless the ratio is in the score."""
    kept: dict[float, Tensor] = {}
    scores = order = None
    for ratio, budget in budgets.items():
        if scores is None or policy.ratio_in_score:
            scores, order = _checked_scores(policy, layer, ratio), None
        if type(policy).select is Policy.select:
            order = policy.rank(scores) if order is None else order
            kept[ratio] = first(order, budget)
        else:
            kept[ratio] = policy.select(scores, budget)
        who = f"policy {policy.name}, layer {layer.index}, r={ratio}"
        check_kept(kept[ratio], layer.n_kv_heads, layer.n_tokens, budget, who=who)
    return kept


def _checked_scores(policy: Policy, layer: PrefillLayer, ratio: float) -> Tensor:
    before = _versions(layer)
    scores = check_scores(policy, policy.score(layer, ratio), layer)
    if _versions(layer) != before or any(signal._version != made for signal, made in layer.memo.values()):
        raise InputError(
            f"policy {policy.name}, layer {layer.index}: expected the layer's tensors untouched, as others read "
            "them; got one changed in place: clone it first"
        )
    return scores


def check_context(policy: Policy, n_tokens: int, what: str) -> None:
    """Refuse a context that the policy cannot judge: a shrunk window is another policy under the same name."""
    if n_tokens < policy.min_tokens:
        raise InputError(
            f"policy {policy.name} needs a context of at least {policy.min_tokens} tokens (its window and sinks), "
            f"{what} has {n_tokens}: use a longer context or a smaller window"
        )


def _versions(layer: PrefillLayer) -> list[int]:
    """Torch's counters of in-place changes of the tensors that every policy shares."""
    shared = (layer.keys, layer.values, layer.cos, layer.sin, layer.hidden_states, layer.attentions)
    return [tensor._version for tensor in shared if tensor is not None]


def check_scores(policy: Policy, scores: Tensor, layer: PrefillLayer) -> Tensor:
    """Return ``scores`` if they are ``[kv_heads, n]`` numbers that rank every token."""
    expected = f"policy {policy.name}, layer {layer.index}: expected scores [{layer.n_kv_heads}, {layer.n_tokens}]"
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        got = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise InputError(f"{expected} of a floating dtype; got {got}")
    if tuple(scores.shape) != (layer.n_kv_heads, layer.n_tokens):
        raise InputError(f"{expected}; got {list(scores.shape)}")
    if bool(scores.isnan().any()):
        raise InputError(f"{expected} without NaN; got {int(scores.isnan().sum())} NaN of {scores.numel()}")
    return scores


def check_budgets(policy: Policy, prefill: Prefill, ratio: float) -> list[int]:
    """Layer budgets that keep at least one pair a layer and in total exactly what every policy keeps at ``ratio``."""
    budgets = policy.layer_budgets(prefill, ratio)
    n_layers = len(prefill.layers)
    total = kept_count(prefill.n_tokens, ratio) * n_layers
    if len(budgets) != n_layers or sum(budgets) != total or not all(1 <= b <= prefill.n_tokens for b in budgets):
        raise InputError(
            f"policy {policy.name} at r={ratio}: expected {n_layers} layer budgets in 1..{prefill.n_tokens} "
            f"with sum {total}; got {len(budgets)} with sum {sum(budgets)}"
        )
    return budgets


@dataclass(frozen=True)
class FunctionPolicy(Policy):
    """A policy made of one scoring function of a layer; see :func:`register_policy`."""

    function: Callable[[PrefillLayer], Tensor]
    label: str
    captures: frozenset = frozenset()

    @property
    def name(self) -> str:
        return self.label

    @property
    def needs(self) -> frozenset:
        return self.captures

    def score(self, layer: PrefillLayer, ratio: float) -> Tensor:
        return self.function(layer)

    def params(self) -> dict[str, Any]:
        return {"source": _source(self.function)}


_REGISTRY: dict[str, Callable[..., Policy]] = {}


def register_policy(name: str, *, needs: Iterable[str] = ("hidden_states",)) -> Callable:
    """Decorator that gives a policy a name for grids, profiles and notebooks.

    On a function ``layer -> scores [kv_heads, n]`` it makes a token top-k policy; on a :class:`Policy` subclass it
    registers the class, whose fields become parameters. Registering a name again replaces it (notebooks rerun cells).

    Example:
        >>> @register_policy("value_norm")
        ... def value_norm(layer):
        ...     return layer.values.norm(dim=-1)
    """

    def register(thing: Callable) -> Callable:
        if isinstance(thing, type) and issubclass(thing, Policy):
            _REGISTRY[name] = thing
        else:
            _REGISTRY[name] = lambda: FunctionPolicy(thing, name, frozenset(needs))
        return thing

    return register


def policy_names() -> list[str]:
    """Registered names, in the order of registration."""
    return list(_REGISTRY)


def make_policy(spec: str | dict[str, Any] | Policy) -> Policy:
    """A fresh policy from a name, ``{"name": ..., parameter: value}``, or a policy as it is.

    Raises:
        InputError: unknown name (nearest one offered) or parameter.
    """
    if isinstance(spec, Policy):
        return spec
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = settings.pop("name", None)
    check_known("policy", name, _REGISTRY)
    try:
        return _REGISTRY[name](**settings)
    except TypeError as error:
        raise InputError(f"policy {name!r}: {error}") from None
