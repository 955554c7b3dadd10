"""Averages, floors, margins and intervals against hand-computed values and scipy."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import bootstrap

from cachecraft_lab.errors import InputError
from cachecraft_lab.stats import margins, per_task, summarise, tasks_above_floor


def records_of(scores: dict[tuple[str, str, float], list[float]], **cell) -> pd.DataFrame:
    """Records from ``{(task, policy, ratio): one score a sample}``."""
    rows = [
        {
            "model": "m",
            "length": 512,
            "setting": "query-agnostic",
            "task": task,
            "sample_id": f"{task}-{i}",
            "policy": policy,
            "ratio": ratio,
            "score": score,
            "finish_reason": "length" if i == 0 else "eos",
            "kept": 512 * (1 - ratio),
            **cell,
        }
        for (task, policy, ratio), values in scores.items()
        for i, score in enumerate(values)
    ]
    return pd.DataFrame(rows)


def row(table: pd.DataFrame, **where) -> pd.Series:
    for name, value in where.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


def test_average_is_over_tasks_not_samples():
    records = records_of({("a", "frc", 0.5): [0.0], ("b", "frc", 0.5): [100.0, 100.0, 100.0]})
    got = row(summarise(records), policy="frc")
    assert got["score"] == 50.0  # the mean over samples would be 75
    # stratified: no draw trades one task's samples for another's
    assert (got["low"], got["high"]) == (50.0, 50.0)
    assert (got["n_samples"], got["n_tasks"], got["kept"], got["cut_off"]) == (4, 2, 256.0, 0.5)


def test_interval_of_two_samples_by_hand():
    # the draws' means are 0, 50, 100 with shares 1/4, 1/2, 1/4: the 2.5 and 97.5 percentiles are the ends
    got = row(summarise(records_of({("a", "frc", 0.5): [0.0, 100.0]})), policy="frc")
    assert (got["score"], got["low"], got["high"]) == (50.0, 0.0, 100.0)


def test_interval_equals_scipys_percentile_bootstrap():
    scores = np.random.default_rng(5).choice([0.0, 25.0, 50.0, 100.0], size=60)
    got = row(summarise(records_of({("a", "frc", 0.5): list(scores)}), n_boot=20000), policy="frc")
    theirs = bootstrap((scores,), np.mean, method="percentile", n_resamples=20000, rng=np.random.default_rng(1))
    assert got["score"] == pytest.approx(scores.mean())
    assert got["low"] == pytest.approx(theirs.confidence_interval.low, abs=0.5)
    assert got["high"] == pytest.approx(theirs.confidence_interval.high, abs=0.5)


def test_intervals_are_the_same_every_time_and_follow_the_seed():
    records = records_of({("a", "frc", 0.5): [0.0, 10.0, 35.0, 70.0, 100.0, 100.0]})
    pd.testing.assert_frame_equal(summarise(records), summarise(records))
    assert row(summarise(records, n_boot=37), ratio=0.5)["low"] != row(summarise(records, n_boot=37, seed=1))["low"]


def test_three_hundred_samples_at_twenty_percent():
    """A normal interval is 20 +- 4.5; two policies that differ by less are tied."""
    rng = np.random.default_rng(0)
    mine, theirs = ([100.0] * 60 + [0.0] * 240, [100.0] * 57 + [0.0] * 243)
    rng.shuffle(mine)
    rng.shuffle(theirs)
    records = records_of({("a", "frc", 0.88): mine, ("a", "snapkv", 0.88): theirs})
    got = row(summarise(records), policy="frc")
    assert got["score"] == 20.0
    assert 20 - got["low"] == pytest.approx(4.5, abs=0.7) and got["high"] - 20 == pytest.approx(4.5, abs=0.7)
    margin = row(margins(records))
    assert margin["margin"] == pytest.approx(1.0)
    assert margin["low"] < 0 < margin["high"] and margin["verdict"] == "tied"


def test_margins_by_hand():
    records = records_of(
        {
            ("a", "full", 0.0): [100.0, 100.0],
            ("a", "frc", 0.5): [80.0, 60.0],
            ("a", "snapkv", 0.5): [70.0, 50.0],  # behind frc by 10 on every sample
            ("a", "knorm", 0.5): [90.0, 70.0],  # ahead by 10 on every sample
            ("a", "tova", 0.5): [60.0, 80.0],  # 20 behind on one, 20 ahead on the other
            ("a", "frc", 0.88): [0.0, 0.0],
            ("a", "snapkv", 0.88): [0.0, 0.0],
            ("a", "knorm", 0.88): [0.0, 0.0],
            ("a", "tova", 0.88): [0.0, 0.0],
        }
    )
    table = margins(records)
    assert set(table["baseline"]) == {"snapkv", "knorm", "tova"}  # the full cache is a ceiling, no baseline
    half = table[table["ratio"] == 0.5]
    for name, margin, low, high, verdict in (
        ("snapkv", 10.0, 10.0, 10.0, "ahead"),
        ("knorm", -10.0, -10.0, -10.0, "behind"),
        ("tova", 0.0, -20.0, 20.0, "tied"),
    ):
        got = row(half, baseline=name)
        assert (got["margin"], got["low"], got["high"], got["verdict"]) == (margin, low, high, verdict)
        assert got["best"] == (name == "knorm")
        assert got["p_first"] == 0.0  # knorm is ahead in every draw
    assert set(table[table["ratio"] == 0.88]["verdict"]) == {"tied"}


def test_the_full_cache_is_no_baseline_even_at_its_own_ratio():
    records = records_of({("a", p, 0.0): [90.0, 80.0] for p in ("full", "frc", "snapkv")})
    assert list(margins(records)["baseline"]) == ["snapkv"]


def test_share_of_draws_in_which_a_policy_is_first():
    # frc is first unless both draws hit the second sample (then 0 against 50): 3 of 4 draws, ties count for nobody
    records = records_of({("a", "frc", 0.5): [100.0, 0.0], ("a", "snapkv", 0.5): [0.0, 40.0]})
    assert row(margins(records, n_boot=20000))["p_first"] == pytest.approx(0.75, abs=0.02)


def test_paired_interval_is_narrower_than_unpaired():
    rng = np.random.default_rng(2)
    hard = rng.choice([0.0, 100.0], size=80)
    easier = np.where(rng.random(80) < 0.1, 100.0 - hard, hard)
    records = records_of({("a", "frc", 0.5): list(hard), ("a", "snapkv", 0.5): list(easier)})
    paired = row(margins(records))
    summary = summarise(records)
    widths = [row(summary, policy=p)["high"] - row(summary, policy=p)["low"] for p in ("frc", "snapkv")]
    assert paired["high"] - paired["low"] < 0.7 * np.hypot(*widths)


def test_floor_leaves_out_what_the_full_cache_cannot_do():
    records = records_of(
        {
            ("easy", "full", 0.0): [100.0, 80.0],
            ("easy", "frc", 0.5): [60.0, 40.0],
            ("edge", "full", 0.0): [20.0, 20.0],
            ("edge", "frc", 0.5): [10.0, 10.0],
            ("hard", "full", 0.0): [20.0, 19.0],
            ("hard", "frc", 0.5): [0.0, 0.0],
        }
    )
    assert tasks_above_floor(records) == ["easy", "edge"]
    got = row(summarise(records), policy="frc")
    assert (got["score"], got["n_tasks"], got["n_samples"]) == (30.0, 2, 4)
    assert row(summarise(records, floor=0), policy="frc")["score"] == 20.0
    assert set(per_task(records)["task"]) == {"easy", "edge", "hard"}  # the table a task shows all
    assert summarise(records, floor=101).empty and margins(records, floor=101).empty


def test_floor_is_judged_cell_by_cell():
    good = records_of({("a", "full", 0.0): [100.0], ("a", "frc", 0.5): [70.0]})
    bad = records_of({("a", "full", 0.0): [0.0], ("a", "frc", 0.5): [0.0]}, length=1024)
    assert set(summarise(pd.concat([good, bad]))["length"]) == {512}


def test_without_a_full_cache_all_tasks_count():
    records = records_of({("a", "frc", 0.5): [0.0], ("b", "frc", 0.5): [10.0]})
    assert row(summarise(records))["score"] == 5.0


def test_cut_off_share_by_task():
    got = row(per_task(records_of({("a", "frc", 0.5): [1.0, 2.0, 3.0, 6.0]})))
    assert (got["score"], got["n_samples"], got["cut_off"]) == (3.0, 4, 0.25)


def test_incomplete_records_are_refused():
    records = records_of({("a", "frc", 0.5): [1.0, 2.0], ("a", "snapkv", 0.5): [1.0, 2.0]})
    for broken in (records.iloc[:-1], records.assign(score=[1.0, float("nan"), 1.0, 2.0])):
        for table in (summarise, margins):
            with pytest.raises(InputError, match="incomplete"):
                table(broken)


def test_repeated_records_are_refused():
    records = records_of({("a", "frc", 0.5): [1.0, 2.0]})
    for table in (summarise, margins, per_task):
        with pytest.raises(InputError, match="more than once"):
            table(pd.concat([records, records.iloc[:1]]))


def test_missing_columns_are_named():
    with pytest.raises(InputError, match="finish_reason"):
        summarise(records_of({("a", "frc", 0.5): [1.0]}).drop(columns="finish_reason"))


def test_equal_scores_tie_whatever_the_floating_point_sum():
    """Sums of the same scores may differ in the last bit from column to column: no lead comes of that."""
    rng = np.random.default_rng(3)
    names = ["frc", *(f"p{i}" for i in range(10))]
    scores = {("a", name, 0.5): [100 / 3, 200 / 3, 100 / 7, 50 / 3, 700 / 9, 100 / 9, 5.1] for name in names}
    scores |= {("b", name, 0.5): list(rng.permutation([100 / 3, 25.0, 12.5, 100 / 7, 0.1])) for name in names[:1]}
    scores |= {("b", name, 0.5): scores["b", "frc", 0.5] for name in names}
    table = margins(records_of(scores))
    assert set(table["verdict"]) == {"tied"}
    assert (table["low"] == 0).all() and (table["high"] == 0).all() and (table["p_first"] == 0).all()
