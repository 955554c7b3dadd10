"""How FRC's constants were chosen: a seeded sweep on samples that no reported result uses.

Each configuration is judged on the same prefills. Rounds of successive halving: many configurations on few samples,
then fewer on more; the last round answers greedily, as the grid does. Earlier rounds use a cheaper stand-in, the mean
probability of the true answer's tokens when it is forced, which needs one forward pass for all configurations.

Run ``python -m cachecraft_lab.calibrate`` to repeat it (about half an hour on 2 cores); the table that it wrote is
data/calibration/sweep.csv and its reading docs/calibration.md.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd
import torch

from .compress import full_kept
from .decode import RaggedCache, _distinct, _lengths, decode, forward, ragged_kernel
from .models import LoadedModel, load_model
from .policies import FRC, Kept, Policy, keep_all, make_policy
from .prefill import Prefill, prefill
from .prompt import encode_prompt
from .ruler import RulerSample, generate, score

SEED = 977_001
"""Seed of the calibration split. Profiles use other seeds; a test holds them apart."""

TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2")
"""All haystack kinds: repeated noise (single_1), essay (single_2, multikey_1), other needles (multikey_2)."""

LENGTHS = (512, 768)
RATIOS = (0.75, 0.88)


@dataclass(frozen=True)
class Round:
    """``n_samples`` a (task, length); the best ``survivors`` go on. ``greedy`` answers as the grid does."""

    n_samples: int
    lengths: tuple[int, ...]
    ratios: tuple[float, ...]
    survivors: int
    greedy: bool = False


ROUNDS = (
    Round(1, (512,), (0.8,), 40),
    Round(1, LENGTHS, RATIOS, 8),
    Round(3, LENGTHS, RATIOS, 2, greedy=True),
    Round(2, LENGTHS, RATIOS, 1, greedy=True),
)

SPACE = {
    "reading": ("window", "local"),
    "window": (8, 16, 32, 64),
    "group": ("mean", "max"),
    "pool": (3, 7, 15, 31),
    "scale": ("max", "mean", "rank"),
    "weights": ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 4, 1), (1, 1, 4), (1, 4, 4), (4, 1, 1)),
    "chunk_length": (1, 8, 16, 32),
    "n_sink": (0, 4),
    "n_recent": (0, 8),
}


def candidates(n: int, seed: int = SEED) -> list[FRC]:
    """``n`` distinct configurations drawn from the whole space, the same ones for a seed."""
    rng = random.Random(seed)
    every = list(itertools.product(*SPACE.values()))
    drawn = []
    for values in rng.sample(every, n):
        settings = dict(zip(SPACE, values, strict=True))
        a, d, s = settings.pop("weights")
        drawn.append(FRC(**settings, w_attention=a, w_density=d, w_salience=s))
    return drawn


@torch.no_grad()
def forced_probability(full: Prefill, question_ids: torch.Tensor, answer: str, kept: Sequence[Kept]) -> list[float]:
    """Mean probability of the true answer's tokens, forced, for each row of ``kept``: one forward pass for all."""
    lm = full.lm
    answer_ids = lm.tokenizer.encode(answer, add_special_tokens=False, return_tensors="pt")
    ids = torch.cat([question_ids, answer_ids], dim=1).to(lm.device)
    unique, row_of = _distinct(kept)
    order = sorted(range(len(unique)), key=lambda i: _lengths(unique[i]))
    found: dict[int, float] = {}
    for block in (order[i : i + 64] for i in range(0, len(order), 64)):
        cache = RaggedCache(full, [unique[i] for i in block], ids.shape[1])
        with ragged_kernel(lm):
            logits = forward(lm, cache, ids.expand(len(block), -1), full.n_tokens, answer_ids.shape[1] + 1)[:, :-1]
        target = answer_ids.to(lm.device).expand(len(block), -1)[..., None]
        probability = logits.float().softmax(-1).gather(-1, target)[..., 0].mean(-1)
        found.update(zip(block, probability.tolist(), strict=True))
    return [found[i] for i in row_of]


def judge(lm: LoadedModel, policies: Sequence[Policy], samples: Sequence[RulerSample], stage: Round) -> pd.DataFrame:
    """A row a (sample, setting, policy, ratio) with ``value`` in [0, 100]."""
    rows: list[tuple] = []
    for sample, aware in itertools.product(samples, (False, True)):
        prompt = encode_prompt(lm, sample.context, sample.question, sample.answer_prefix, query_aware=aware)
        full = prefill(lm, prompt.context_ids)
        labels, kept = [], []
        for i, found in enumerate(keep_all(policies, full, stage.ratios)):
            labels += [(i, ratio) for ratio in found]
            kept += found.values()
        if stage.greedy:
            answers = decode(full, prompt.question_ids, kept, min(sample.max_new_tokens, 24))
            texts = [lm.tokenizer.decode(a.token_ids, skip_special_tokens=True) for a in answers]
            values = [score(sample.task, text, sample.answers) for text in texts]
        else:
            forced = forced_probability(full, prompt.question_ids, " " + sample.answers[0], kept)
            values = [100 * p for p in forced]
        for (i, ratio), value in zip(labels, values, strict=True):
            rows.append((i, sample.task, sample.id, aware, ratio, value))
        print(
            f"{sample.id} {'aware' if aware else 'agnostic'}: best {max(values):.1f}",
            file=sys.stderr,
            flush=True,
        )
    return pd.DataFrame(rows, columns=["i", "task", "sample_id", "query_aware", "ratio", "value"])


def usable(lm: LoadedModel, task: str, length: int, n: int, seed: int) -> list[RulerSample]:
    """``n`` samples that the full cache answers (true answer's mean probability above a half): others tell nothing."""
    found = []
    for sample in generate(task, length, lm.tokenizer, n_samples=8 * n, seed=seed):
        prompt = encode_prompt(lm, sample.context, sample.question, sample.answer_prefix)
        full = prefill(lm, prompt.context_ids, capture=frozenset())
        if forced_probability(full, prompt.question_ids, " " + sample.answers[0], [full_kept(full)])[0] > 0.5:
            found.append(sample)
        if len(found) == n:
            break
    return found


def mean_over_tasks(judged: pd.DataFrame) -> pd.Series:
    """Mean over settings, ratios and tasks alike, a configuration."""
    return judged.groupby(["i", "task"])["value"].mean().groupby("i").mean()


def sweep(lm: LoadedModel, n: int = 240, rounds: Sequence[Round] = ROUNDS, out: Path | None = None) -> pd.DataFrame:
    """Successive halving over ``n`` configurations; a row a (round, configuration), baselines in the last round."""
    pool: list[FRC] = candidates(n)
    tables = []
    for number, stage in enumerate(rounds, start=1):
        samples = [
            s
            for length, task in itertools.product(stage.lengths, TASKS)
            for s in usable(lm, task, length, stage.n_samples, SEED + number)
        ]
        contenders: list[Policy] = list(pool)
        if stage.greedy:
            contenders += [make_policy(name) for name in ("snapkv", "chunkkv", "knorm", "keydiff")]
        judged = judge(lm, contenders, samples, stage)
        means = mean_over_tasks(judged)
        by = judged.groupby(["i", "query_aware"])["value"].mean().unstack()
        for i, policy in enumerate(contenders):
            tables.append(
                {
                    "round": number,
                    "measure": "greedy score" if stage.greedy else "forced answer probability",
                    "policy": policy.name,
                    **(asdict(policy) if isinstance(policy, FRC) else {}),
                    "value": means[i],
                    "agnostic": by.loc[i, False],
                    "aware": by.loc[i, True],
                    "n_samples": len(samples),
                }
            )
        whole = [i for i, frc in enumerate(pool) if min(frc.w_attention, frc.w_density, frc.w_salience) > 0]
        # equal means: the one whose worse setting is better; a left-out signal is shown, but goes no further
        ranked = sorted(whole, key=lambda i: (-means[i], -by.loc[i].min()))
        pool = [pool[i] for i in ranked[: stage.survivors]]
        print(
            f"round {number}: best {means[ranked[0]]:.2f}, {contenders[ranked[0]]}",
            file=sys.stderr,
            flush=True,
        )
        if number == 2:
            pool = widen(pool)
        if number == 3:
            pool = beyond(pool)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            pd.DataFrame(tables).to_csv(out, index=False, float_format="%.3f")
    return pd.DataFrame(tables)


def widen(pool: list[FRC]) -> list[FRC]:
    """The survivors and the neighbours of the best one, so that the next round shows knife-edges."""
    best = pool[0]
    near = [replace(best, chunk_length=c) for c in SPACE["chunk_length"]]
    near += [replace(best, pool=p) for p in SPACE["pool"]]
    near += [replace(best, **{w: 0.0}) for w in ("w_attention", "w_density", "w_salience")]
    return list(dict.fromkeys(pool + near))


def beyond(pool: list[FRC]) -> list[FRC]:
    """The survivors, and the best with windows and poolings outside the space: its edge must not decide."""
    far = [replace(pool[0], window=w, pool=p) for w in (4, 8, 12) for p in (31, 45, 63)]
    return list(dict.fromkeys(pool + far))


if __name__ == "__main__":
    sweep(load_model(), out=Path("data/calibration/sweep.csv"))
