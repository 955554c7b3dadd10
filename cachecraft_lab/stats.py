"""Records -> tables: RULER averages, paired margins, ranks, each with a bootstrap interval.

A RULER average is the mean over tasks of the mean score of a task's samples. Intervals are 95 % percentile
intervals of a bootstrap over samples, stratified by task, with the same draws for every policy (paired).

Tasks that the model cannot do with the full cache say nothing about eviction: a task whose full-cache mean is
under ``FLOOR`` points in a (model, length, setting) is left out of that cell's averages. The rule was set before
any reported result was seen; per-task tables show all tasks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from .errors import InputError
from .evaluate import FULL

FLOOR = 20.0
CELL = ["model", "length", "setting"]
KEY = ["sample_id", "policy", "ratio"]
SUMMARY = [*CELL, "policy", "ratio", "score", "low", "high", "n_samples", "n_tasks", "kept", "cut_off"]
MARGINS = [*CELL, "ratio", "baseline", "margin", "low", "high", "best", "verdict", "p_first"]


def per_task(records: pd.DataFrame) -> pd.DataFrame:
    """Mean score, sample count and share of answers cut off by the token limit, a (cell, task, policy, ratio)."""
    groups = _checked(records).groupby([*CELL, "task", "policy", "ratio"], sort=False)
    return groups.agg(
        score=("score", "mean"),
        n_samples=("score", "size"),
        cut_off=("finish_reason", lambda reasons: (reasons == "length").mean()),
    ).reset_index()


def tasks_above_floor(cell: pd.DataFrame, floor: float = FLOOR) -> list[str]:
    """Tasks of one cell whose full-cache mean reaches ``floor``; all tasks where the full cache was not run."""
    full = cell[cell["policy"] == FULL].groupby("task", sort=False)["score"].mean()
    tasks = list(dict.fromkeys(cell["task"]))
    return [task for task in tasks if task not in full.index or full[task] >= floor]


def summarise(records: pd.DataFrame, *, floor: float = FLOOR, n_boot: int = 2000, seed: int = 0) -> pd.DataFrame:
    """RULER average of each policy at each ratio, by cell, with its interval.

    Returns:
        Columns model, length, setting, policy, ratio, score, low, high, n_samples, n_tasks, kept (mean KV pairs a
        head and layer), cut_off (share of answers that the token limit ended).
    """
    rows = []
    for cell, table, weights in _cells(records, floor, n_boot, seed):
        point, draws = table.scores.mean_over_tasks(), table.scores.draws(weights)
        low, high = np.percentile(draws, [2.5, 97.5], axis=0)
        for i, (policy, ratio) in enumerate(table.columns):
            chosen = table.records[(table.records["policy"] == policy) & (table.records["ratio"] == ratio)]
            rows.append(
                {
                    **cell,
                    "policy": policy,
                    "ratio": ratio,
                    "score": point[i],
                    "low": low[i],
                    "high": high[i],
                    "n_samples": len(chosen),
                    "n_tasks": chosen["task"].nunique(),
                    "kept": chosen["kept"].mean(),
                    "cut_off": (chosen["finish_reason"] == "length").mean(),
                }
            )
    return pd.DataFrame(rows, columns=SUMMARY)


def margins(
    records: pd.DataFrame,
    policy: str = "frc",
    *,
    floor: float = FLOOR,
    n_boot: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """``policy`` minus each other one, paired by sample, a (cell, ratio).

    Returns:
        Columns model, length, setting, ratio, baseline, margin, low, high (RULER points), best (True for the
        baseline with the highest average of that cell and ratio), verdict (``ahead`` or ``behind`` where the
        interval excludes 0, else ``tied``) and p_first (share of draws in which ``policy`` is first of all).
    """
    rows = []
    for cell, table, weights in _cells(records, floor, n_boot, seed):
        point, draws = table.scores.mean_over_tasks(), table.scores.draws(weights)
        place = {column: i for i, column in enumerate(table.columns)}
        for ratio in sorted({ratio for name, ratio in table.columns if name == policy}):
            others = [name for name, r in table.columns if r == ratio and name not in (policy, FULL)]
            if not others:
                continue
            mine = place[policy, ratio]
            best = max(others, key=lambda name: point[place[name, ratio]])
            theirs = draws[:, [place[name, ratio] for name in others]]
            for name in others:
                difference = draws[:, mine] - draws[:, place[name, ratio]]
                low, high = np.percentile(difference, [2.5, 97.5])
                rows.append(
                    {
                        **cell,
                        "ratio": ratio,
                        "baseline": name,
                        "margin": point[mine] - point[place[name, ratio]],
                        "low": low,
                        "high": high,
                        "best": name == best,
                        "verdict": "ahead" if low > 0 else "behind" if high < 0 else "tied",
                        "p_first": float((draws[:, mine] > theirs.max(axis=1)).mean()),
                    }
                )
    return pd.DataFrame(rows, columns=MARGINS)


class _Scores:
    """Scores as a matrix ``[samples, (policy, ratio)]`` with the task of each sample."""

    def __init__(self, matrix: np.ndarray, tasks: np.ndarray) -> None:
        self.matrix, self.tasks = matrix, tasks
        self.names = list(dict.fromkeys(tasks))

    def mean_over_tasks(self) -> np.ndarray:
        return np.mean([self.matrix[self.tasks == task].mean(axis=0) for task in self.names], axis=0)

    def bootstrap_weights(self, n_boot: int, rng: np.random.Generator) -> np.ndarray:
        """``[n_boot, samples]``: a draw's RULER average is its row times the matrix."""
        weights = np.zeros((n_boot, len(self.tasks)))
        for task in self.names:
            members = np.flatnonzero(self.tasks == task)
            counts = rng.multinomial(len(members), np.full(len(members), 1 / len(members)), size=n_boot)
            weights[:, members] = counts / len(members) / len(self.names)
        return weights

    def draws(self, weights: np.ndarray) -> np.ndarray:
        """RULER averages ``[n_boot, (policy, ratio)]``, rounded: a difference of 1e-14 is a tie, not a lead."""
        return np.round(weights @ self.matrix, 9)


class _Table:
    def __init__(self, records: pd.DataFrame) -> None:
        self.records = records
        wide = records.pivot(index=["task", "sample_id"], columns=["policy", "ratio"], values="score")
        wide = wide[list(dict.fromkeys(zip(records["policy"], records["ratio"], strict=True)))]
        if wide.isna().any().any():
            raise InputError("records are incomplete: some samples lack a policy or ratio; finish the run first")
        self.columns = list(wide.columns)
        self.scores = _Scores(wide.to_numpy(dtype=float), wide.index.get_level_values("task").to_numpy())


def _cells(records: pd.DataFrame, floor: float, n_boot: int, seed: int) -> Iterator[tuple[dict, _Table, np.ndarray]]:
    for values, cell in _checked(records).groupby(CELL, sort=False):
        chosen = cell[cell["task"].isin(tasks_above_floor(cell, floor))]
        if chosen.empty:
            continue
        table = _Table(chosen)
        weights = table.scores.bootstrap_weights(n_boot, np.random.default_rng(seed))
        yield dict(zip(CELL, values, strict=True)), table, weights


def _checked(records: pd.DataFrame) -> pd.DataFrame:
    """Records with one row a (cell, sample, policy, ratio): two configurations in one table would average silently."""
    wanted = [*CELL, "task", *KEY, "score", "finish_reason", "kept"]
    if missing := [name for name in wanted if name not in records.columns]:
        raise InputError(f"records lack the columns {missing}: give what `cachecraft grid` wrote")
    if records.duplicated([*CELL, *KEY]).any():
        raise InputError(
            "records hold a (sample, policy, ratio) more than once: choose one run, and of a policy with two sets of "
            "parameters (policy_params) one set, before averaging"
        )
    return records
