"""The grid figure: what it shows, and equal bytes from equal data."""

from __future__ import annotations

from itertools import pairwise

import matplotlib.colors
import pandas as pd
import pytest

from cachecraft_lab import figures
from cachecraft_lab.policies import policy_names

POLICIES = ("full", "frc", "snapkv", "my_policy")
RATIOS = (0.5, 0.88)


@pytest.fixture
def summary() -> pd.DataFrame:
    rows = []
    for length in (512, 1024):
        for setting in ("query-agnostic", "query-aware"):
            for k, policy in enumerate(POLICIES):
                for ratio in (0.0,) if policy == "full" else RATIOS:
                    score = 90.0 - 20 * k - 30 * ratio
                    rows.append(
                        {
                            "model": "tiny",
                            "length": length,
                            "setting": setting,
                            "policy": policy,
                            "ratio": ratio,
                            "score": score,
                            "low": score - 4,
                            "high": score + 6,
                            "n_samples": 24,
                            "n_tasks": 3,
                        }
                    )
    return pd.DataFrame(rows)


def test_saved_twice_gives_the_same_bytes(summary, tmp_path):
    first = figures.save(figures.grid_figure(summary, "a title"), tmp_path / "one" / "grid")
    second = figures.save(figures.grid_figure(summary, "a title"), tmp_path / "two" / "grid")
    assert [p.name for p in first] == ["grid.png", "grid.svg"]
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()
    other = summary.assign(score=summary["score"] + 1)
    third = figures.save(figures.grid_figure(other, "a title"), tmp_path / "three" / "grid")
    assert all(a.read_bytes() != b.read_bytes() for a, b in zip(first, third, strict=True))


def test_a_panel_a_cell_and_a_line_a_policy(summary):
    figure = figures.grid_figure(summary, "a title")
    assert len(figure.axes) == 4
    assert figure.get_suptitle() == "a title"
    for ax in figure.axes:
        assert len(ax.containers) == 3  # error-bar containers: every policy but the full cache
        for container, policy in zip(ax.containers, POLICIES[1:], strict=True):
            line = container.lines[0]
            cell = summary[(summary["policy"] == policy) & (summary["length"] == 512)].iloc[:2]
            assert list(line.get_ydata()) == list(cell["score"])
            assert (line.get_color(), line.get_marker()) == figures.style(policy)
            bars = container.lines[2][0].get_segments()  # the intervals, as given: asymmetric
            for segment, score in zip(bars, cell["score"], strict=True):
                assert sorted(segment[:, 1]) == pytest.approx([score - 4, score + 6])
        shown = {text.get_text() for text in ax.texts}
        assert {"frc", "snapkv", "my policy", "full cache"} <= shown
        assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0.5", "0.88"]
        assert "24 samples, 3 tasks" in ax.get_title(loc="left")
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert "tiny, 512 tokens, query-agnostic" in titles[0] and "tiny, 1024 tokens, query-aware" in titles[3]


def test_axes_say_what_and_in_which_unit(summary):
    axes = figures.grid_figure(summary).axes
    assert axes[0].get_ylabel() == axes[2].get_ylabel() == "RULER average (points)"
    assert all("fraction of KV pairs removed" in ax.get_xlabel() for ax in axes[2:])


def test_names_at_the_lines_ends_do_not_overlap(summary):
    """Six lines that end at one score: their names stay a gap apart and inside the panel."""
    rows = [
        {**summary.iloc[0].to_dict(), "policy": f"p{k}", "ratio": ratio, "score": 99.0, "low": 98.0, "high": 100.0}
        for k in range(6)
        for ratio in RATIOS
    ]
    ax = figures.grid_figure(pd.DataFrame(rows)).axes[0]
    heights = sorted(text.xyann[1] for text in ax.texts if hasattr(text, "xyann"))
    assert len(heights) == 6 and all(b - a >= 6.99 for a, b in pairwise(heights))
    assert heights[0] >= ax.get_ylim()[0] and heights[-1] <= ax.get_ylim()[1]


def test_a_cell_without_results_leaves_no_empty_panel(summary):
    part = summary[(summary["length"] == 512) | (summary["setting"] == "query-agnostic")]
    visible = [ax.get_visible() for ax in figures.grid_figure(part).axes]
    assert visible == [True, True, True, False]


def test_every_policy_has_a_style_of_its_own():
    assert {name for name in policy_names() if name in figures.STYLE} >= {"frc", "snapkv", "observed_attention"}
    pairs = [*figures.STYLE.values(), *figures.SPARE]
    assert len(set(pairs)) == len(pairs)
    assert len({marker for _, marker in pairs}) == len(pairs)  # told apart without colour
    assert all(matplotlib.colors.is_color_like(colour) for colour, _ in pairs)


def test_an_unknown_policy_gets_the_same_spare_style_every_time():
    assert figures.style("my_policy") == figures.style("my_policy") in figures.SPARE
