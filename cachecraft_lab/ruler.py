"""RULER samples: generated at any length for any tokenizer, or read from the hub; and RULER's match rules.

The generator follows RULER's task structure (Hsieh et al., arXiv:2404.06654) in our own wording. Samples have the
schema of the ``simonjegou/ruler`` data set, so both sources go the same way from here on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from random import Random

import pandas as pd
from transformers import PreTrainedTokenizerBase

from .errors import InputError
from .ruler_match import flags, string_match_all, string_match_part, visible_text
from .ruler_tasks import Niah, Plan, cwe, fwe, niah, qa, vt

__all__ = [
    "COLUMNS",
    "HUB_DATASET",
    "TASKS",
    "RulerSample",
    "TaskSpec",
    "flags",
    "generate",
    "load_hub",
    "resolve_task",
    "score",
    "string_match_all",
    "string_match_part",
    "visible_text",
]

HUB_DATASET = "simonjegou/ruler"
COLUMNS = ("context", "question", "answer_prefix", "answer", "task", "max_new_tokens")


@dataclass(frozen=True, repr=False)
class RulerSample:
    """One question about a long context.

    Attributes:
        task: task name, such as ``niah_single_1``.
        context: instruction and haystack, ends in one newline; what a query-agnostic policy compresses.
        question: asked after the context.
        answer_prefix: first words of the answer, given to the model; leads straight into ``answers``.
        answers: reference strings.
        max_new_tokens: RULER's limit for the answer.
        id: unique over tasks, lengths and seeds, such as ``niah_single_1-512-s0-0003``.
    """

    task: str
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    id: str

    def __repr__(self) -> str:
        return (
            f"RulerSample({self.id}, context={self.context[:40]!r}... ({len(self.context)} chars), "
            f"question={self.question!r}, answers={self.answers!r})"
        )


@dataclass(frozen=True)
class TaskSpec:
    """How a task is made and marked.

    Attributes:
        make: (random source, tokens asked for) -> plan.
        max_new_tokens: RULER's limit for the answer.
        match: ``all`` (share of the references found) or ``part`` (any one of them).
        synthetic: made of invented facts where RULER has a public data set.
    """

    make: Callable[[Random, int], Plan]
    max_new_tokens: int
    match: str = "all"
    synthetic: bool = False


def _niah(**spec: object) -> TaskSpec:
    return TaskSpec(partial(niah, Niah(**spec)), max_new_tokens=128)


TASKS: dict[str, TaskSpec] = {
    "niah_single_1": _niah(haystack="noise"),
    "niah_single_2": _niah(haystack="essay"),
    "niah_single_3": _niah(haystack="essay", value="uuids"),
    "niah_multikey_1": _niah(haystack="essay", n_keys=4),
    "niah_multikey_2": _niah(haystack="needles"),
    "niah_multikey_3": _niah(haystack="needles", key="uuids", value="uuids"),
    "niah_multivalue": _niah(haystack="essay", n_values=4),
    "niah_multiquery": _niah(haystack="essay", n_keys=4, n_asked=4),
    "vt": TaskSpec(vt, max_new_tokens=30),
    "cwe": TaskSpec(cwe, max_new_tokens=120),
    "fwe": TaskSpec(fwe, max_new_tokens=50),
    # RULER's qa_1 is SQuAD and qa_2 HotpotQA; what we make is named apart, so that no table mixes them up
    "qa_1_synthetic": TaskSpec(partial(qa, hops=1), max_new_tokens=32, match="part", synthetic=True),
    "qa_2_synthetic": TaskSpec(partial(qa, hops=2), max_new_tokens=32, match="part", synthetic=True),
}


def generate(
    task: str, n_tokens: int, tokenizer: PreTrainedTokenizerBase, *, n_samples: int, seed: int = 0
) -> list[RulerSample]:
    """Make samples of one task, the same byte for byte for the same arguments on any machine.

    The length of a sample is the tokens of context, question and answer prefix, each without special tokens; it
    is at most ``n_tokens`` and at most 2% below. Sample ``i`` does not depend on ``n_samples``.

    Args:
        task: a name of ``TASKS``; ``qa_1`` and ``qa_2`` make samples named ``qa_1_synthetic``, ``qa_2_synthetic``.
        n_tokens: length to fill to.
        tokenizer: counts the tokens.
        n_samples: how many.
        seed: any integer; another seed, other samples.

    Raises:
        InputError: unknown task, no samples asked for, or a length that is too small for the task.
    """
    task = resolve_task(task)
    spec = TASKS[task]
    if n_samples < 1:
        raise InputError(f"n_samples must be >= 1, got {n_samples}")
    return [_sample(task, spec, n_tokens, tokenizer, seed, index) for index in range(n_samples)]


def score(task: str, prediction: str, answers: Sequence[str]) -> float:
    """Score a prediction by the task's rule, 0 to 100, think text left out."""
    rule = string_match_part if TASKS[resolve_task(task)].match == "part" else string_match_all
    return rule(visible_text(prediction)[0], answers)


def resolve_task(task: str) -> str:
    """A name of ``TASKS``: RULER's ``qa_1`` and ``qa_2`` stand for the ``_synthetic`` task of the same rule."""
    name = f"{task}_synthetic" if task in ("qa_1", "qa_2") else task
    if name not in TASKS:
        raise InputError(f"unknown RULER task {task!r}; known: {', '.join(TASKS)}")
    return name


def _sample(
    task: str, spec: TaskSpec, n_tokens: int, tokenizer: PreTrainedTokenizerBase, seed: int, index: int
) -> RulerSample:
    # a string seeds Random through sha512: stable over machines and Python versions, unlike hash()
    plan = spec.make(Random(f"ruler|{task}|{n_tokens}|{seed}|{index}"), n_tokens)

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    asked = count(plan.question) + count(plan.answer_prefix)
    return RulerSample(
        task=task,
        context=_fill(plan, n_tokens - asked, count, task, n_tokens),
        question=plan.question,
        answer_prefix=plan.answer_prefix,
        answers=plan.answers,
        max_new_tokens=spec.max_new_tokens,
        id=f"{task}-{n_tokens}-s{seed}-{index:04d}",
    )


def _fill(plan: Plan, room: int, count: Callable[[str], int], task: str, n_tokens: int) -> str:
    """The longest context of at most ``room`` tokens: whole units first, then words of the next one."""
    least = count(plan.build(plan.min_units, 0))
    if least > room:
        raise InputError(f"{task} needs at least {n_tokens - room + least} tokens here, asked for {n_tokens}")
    units = _largest(plan.min_units, plan.max_units, room, lambda n: count(plan.build(n, 0)))
    if units == plan.max_units:
        raise InputError(f"{task} has too few different words for {n_tokens} tokens: ask for fewer")
    words = _largest(0, room, room, lambda n: count(plan.build(units, n)))
    return plan.build(units, words)


def _largest(low: int, most: int, room: int, tokens: Callable[[int], int]) -> int:
    """The largest n in low..most with tokens(n) <= room, given that low has: each probe tokenises, so few.

    Growing steps find an n that is too large; from there interpolation, as tokens grow about evenly, and
    bisection in turn, in case they do not.
    """
    step, at_low = 1, tokens(low)
    while (at_high := tokens(min(low + step, most))) <= room:
        low, step, at_low = min(low + step, most), step * 4, at_high
        if low == most:
            return most
    high, halve = min(low + step, most), False
    while high - low > 1:
        share = 0.5 if halve else (room - at_low) / (at_high - at_low)
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        at_middle = tokens(middle)
        if at_middle <= room:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
        halve = not halve
    return low


def load_hub(
    config: str | int,
    *,
    tasks: Sequence[str] | None = None,
    fraction: float = 1.0,
    seed: int = 0,
    revision: str | None = None,
    path: str | Path | None = None,
) -> list[RulerSample]:
    """Read RULER samples from the hub's ``simonjegou/ruler``, or from local parquet in the same layout.

    Args:
        config: the length, such as 4096 or 8192.
        tasks: names to keep; None keeps all.
        fraction: share of each task's rows to keep, in (0, 1], at least one row a task.
        seed: which rows a fraction keeps.
        revision: commit of the data set. None resolves to the newest; its first 7 digits stand in every sample
            id, so that a rerun can name it.
        path: a parquet file, or a folder with ``<config>/*.parquet`` or ``*.parquet``, read instead of the hub.

    Raises:
        InputError: no such data, a column or task that is missing, or a fraction out of range.
    """
    if not 0 < fraction <= 1:
        raise InputError(f"fraction must be in (0, 1], got {fraction}")
    frame, origin = _local_rows(Path(path), str(config)) if path else _hub_rows(str(config), revision)
    if missing := [name for name in COLUMNS if name not in frame.columns]:
        raise InputError(f"RULER data lacks the column(s) {', '.join(missing)}; expected {', '.join(COLUMNS)}")
    if absent := set(tasks or ()) - set(frame["task"]):
        raise InputError(
            f"RULER data has no task {', '.join(sorted(absent))}; it has {', '.join(sorted(set(frame['task'])))}"
        )
    return [
        RulerSample(
            task=row["task"],
            context=row["context"],
            question=row["question"],
            answer_prefix=row["answer_prefix"],
            answers=(row["answer"],) if isinstance(row["answer"], str) else tuple(map(str, row["answer"])),
            max_new_tokens=int(row["max_new_tokens"]),
            id=f"{task}-{config}-{origin}-{index:04d}",
        )
        for task, rows in frame.groupby("task", sort=False)
        if tasks is None or task in tasks
        for index, row in _subset(rows.to_dict("records"), fraction, f"{task}|{seed}")
    ]


def _subset(rows: list[dict], fraction: float, seed: str) -> list[tuple[int, dict]]:
    """(number within the task, row) of a seeded share of the rows, in their order."""
    n_keep = max(1, round(fraction * len(rows)))
    return [(i, rows[i]) for i in sorted(Random(seed).sample(range(len(rows)), n_keep))]


def _local_rows(path: Path, config: str) -> tuple[pd.DataFrame, str]:
    files = [path] if path.is_file() else sorted((path / config).glob("*.parquet")) or sorted(path.glob("*.parquet"))
    if not files:
        raise InputError(f"no RULER parquet at {path}: give a file, or a folder with {config}/*.parquet")
    return pd.concat([pd.read_parquet(file) for file in files], ignore_index=True), "local"


@lru_cache(maxsize=2)
def _hub_rows(config: str, revision: str | None) -> tuple[pd.DataFrame, str]:
    """All rows of a config, and the revision's mark in sample ids; kept, as a grid asks once a task."""
    from datasets import load_dataset  # imports slowly, and only this path needs it
    from huggingface_hub import HfApi

    try:
        whole_commit = revision is not None and len(revision) == 40  # needs no hub if the rows are cached
        commit = revision if whole_commit else HfApi().dataset_info(HUB_DATASET, revision=revision).sha
        return load_dataset(HUB_DATASET, config, split="test", revision=commit).to_pandas(), f"hub{commit[:7]}"
    except Exception as error:  # the hub's clients raise many kinds; each means that there is no data
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise InputError(
            f"cannot read {HUB_DATASET} config {config} from the hub ({type(error).__name__}: {reason}); "
            "offline, name a cached 40-digit revision, a local folder, or generate the samples"
        ) from error
