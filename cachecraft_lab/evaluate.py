"""Samples x policies x ratios -> tidy records, one prefill a sample.

A record is one row: a sample answered by one policy at one ratio. Metrics, tables and figures are functions of
records; docs/records.md explains every column.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from .compress import full_kept, kept_bytes
from .decode import DecodeStats, Generation, decode
from .errors import InputError
from .models import LoadedModel
from .policies import Kept, Policy, keep_all, make_policy
from .policies.base import check_context
from .prefill import check_attentions, prefill
from .prompt import Prompt, encode_prompt
from .ruler import RulerSample, flags, score, visible_text
from .select import check_ratio

FULL = "full"
"""The uncompressed cache as a policy name: the ceiling, answered once a sample at ratio 0."""

SETTINGS = {False: "query-agnostic", True: "query-aware"}


@dataclass
class Counts:
    """What an evaluation cost, for the manifest; summed over its samples."""

    samples: int = 0
    records: int = 0
    prefill_forward_passes: int = 0
    decode_forward_passes: int = 0
    rows: int = 0
    rows_decoded: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "score": 0.0, "decode": 0.0})

    def add(self, other: Counts) -> None:
        for name in (
            "samples",
            "records",
            "prefill_forward_passes",
            "decode_forward_passes",
            "rows",
            "rows_decoded",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds


def evaluate(
    lm: LoadedModel,
    samples: Sequence[RulerSample],
    policies: Sequence[str | dict[str, Any] | Policy],
    ratios: Sequence[float],
    *,
    query_aware: bool = False,
    max_new_tokens: int | None = None,
    memory_budget: int = 2 * 2**30,
    chunk_size: int | None = None,
    counts: Counts | None = None,
    progress: Callable[[RulerSample], None] = lambda sample: None,
) -> pd.DataFrame:
    """Answer every sample with every policy at every ratio; the context of a sample is prefilled once.

    Args:
        lm: the model.
        samples: what to answer.
        policies: names, ``{"name": ..., parameter: value}`` or policy objects; ``"full"`` is the uncompressed cache.
        ratios: compression ratios, the fraction of KV pairs removed, in [0, 1).
        query_aware: False compresses the context and then asks (kvpress's default); True puts the question into
            what is compressed.
        max_new_tokens: cap on the tokens that a sample's task allows; None takes the task's own.
        memory_budget: bytes of gathered caches that decode holds at a time.
        chunk_size: tokens a prefill call; None takes the context whole.
        counts: added to, if given.
        progress: called with each sample as it ends.

    Returns:
        One row a (sample, policy, ratio), in that order.

    Raises:
        InputError: before any model work, for whatever the arguments alone can show to be wrong.
    """
    plan = check_plan(lm, samples, policies, ratios, query_aware=query_aware, max_new_tokens=max_new_tokens)
    counts = counts if counts is not None else Counts()
    rows: list[dict[str, Any]] = []
    for sample, prompt, n_new in zip(samples, plan.prompts, plan.max_new_tokens, strict=True):
        rows += _evaluate_sample(lm, sample, prompt, n_new, plan, memory_budget, chunk_size, counts)
        progress(sample)
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Plan:
    """Arguments that were checked, and the prompts that checking them made."""

    policies: list[Policy]
    full: bool
    ratios: list[float]
    prompts: list[Prompt]
    max_new_tokens: list[int]


def check_plan(
    lm: LoadedModel,
    samples: Sequence[RulerSample],
    policies: Sequence[str | dict[str, Any] | Policy],
    ratios: Sequence[float],
    *,
    query_aware: bool = False,
    max_new_tokens: int | None = None,
) -> Plan:
    """Everything that can be wrong with an evaluation, found before the model runs."""
    if not samples:
        raise InputError("samples is empty: give at least one RulerSample")
    if len({sample.id for sample in samples}) != len(samples):
        raise InputError("sample ids repeat: records are told apart by them, give each sample its own")
    if not policies:
        raise InputError("policies is empty: name at least one, or 'full'")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    made = [make_policy(spec) for spec in policies if spec != FULL]
    for i, policy in enumerate(made):
        if any(policy.name == other.name and policy.params() == other.params() for other in made[:i]):
            raise InputError(f"policy {policy.name!r} is named twice with the same parameters")
    if len(policies) - len(made) > 1:
        raise InputError(f"policy {FULL!r} is named twice")
    if made and not ratios:
        raise InputError("ratios is empty: give at least one compression ratio in [0, 1)")
    ratios = [check_ratio(ratio) for ratio in ratios]
    if len(set(ratios)) != len(ratios):
        raise InputError(f"ratios repeat: {ratios}")
    for policy in made:
        check_attentions(lm, policy.needs)
    prompts = [encode_prompt(lm, s.context, s.question, s.answer_prefix, query_aware=query_aware) for s in samples]
    allowed = [min(s.max_new_tokens, max_new_tokens or s.max_new_tokens) for s in samples]
    for sample, prompt, n_new in zip(samples, prompts, allowed, strict=True):
        n_context = prompt.context_ids.shape[1]
        lm.check_length(n_context + prompt.question_ids.shape[1] + n_new)
        for policy in made:
            check_context(policy, n_context, f"sample {sample.id}")
    return Plan(made, len(made) < len(policies), ratios, prompts, allowed)


def _evaluate_sample(
    lm: LoadedModel,
    sample: RulerSample,
    prompt: Prompt,
    n_new: int,
    plan: Plan,
    memory_budget: int,
    chunk_size: int | None,
    counts: Counts,
) -> list[dict[str, Any]]:
    capture = frozenset().union(*(policy.needs for policy in plan.policies))
    full = prefill(lm, prompt.context_ids, capture=capture, chunk_size=chunk_size)

    started = time.perf_counter()
    kept: list[tuple[str, str, float, Kept]] = [(FULL, "{}", 0.0, full_kept(full))] if plan.full else []
    for policy, found in zip(plan.policies, keep_all(plan.policies, full, plan.ratios), strict=True):
        params = json.dumps(policy.params(), sort_keys=True)
        kept += [(policy.name, params, ratio, indices) for ratio, indices in found.items()]
    scored = time.perf_counter()

    stats = DecodeStats()
    answers = decode(full, prompt.question_ids, [k for *_, k in kept], n_new, memory_budget=memory_budget, stats=stats)
    ended = time.perf_counter()

    counts.add(
        Counts(
            samples=1,
            records=len(kept),
            prefill_forward_passes=full.forward_passes,
            decode_forward_passes=stats.forward_passes,
            rows=stats.rows,
            rows_decoded=stats.decoded_rows,
            seconds={"prefill": full.seconds, "score": scored - started, "decode": ended - scored},
        )
    )
    common = {
        **_model_columns(lm),
        "task": sample.task,
        "sample_id": sample.id,
        "setting": SETTINGS[prompt.query_aware],
        "context_tokens": prompt.context_ids.shape[1],
        "question_tokens": prompt.question_ids.shape[1],
        "max_new_tokens": n_new,
        "full_cache_bytes": full.nbytes,
        "sample_seconds": full.seconds + ended - started,
    }
    return [
        {
            **common,
            "policy": name,
            "policy_params": params,
            "ratio": ratio,
            **_kept_columns(full, indices),
            **_answer_columns(lm, sample, answer),
        }
        for (name, params, ratio, indices), answer in zip(kept, answers, strict=True)
    ]


def _model_columns(lm: LoadedModel) -> dict[str, Any]:
    described = lm.describe()
    return {"model": described.pop("name"), **described}


def _kept_columns(full: Any, indices: Kept) -> dict[str, Any]:
    counts = [layer.shape[-1] for layer in indices]
    return {
        "kept": sum(counts) / len(counts),
        "kept_min": min(counts),
        "kept_max": max(counts),
        "cache_bytes": kept_bytes(full, indices),
        "storage": "removed",
        "positions": "original",
    }


def _answer_columns(lm: LoadedModel, sample: RulerSample, answer: Generation) -> dict[str, Any]:
    prediction = lm.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    text, _ = visible_text(prediction)
    return {
        "prediction": prediction,
        "answers": json.dumps(list(sample.answers)),
        "score": score(sample.task, text, sample.answers),
        "new_tokens": len(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "flags": ",".join(flags(prediction, sample.answers)),
    }
