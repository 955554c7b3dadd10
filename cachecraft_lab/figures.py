"""Tables -> figures. One style for all: a policy has one colour and marker everywhere; PNG and SVG, same bytes."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from .errors import InputError
from .evaluate import FULL

# Okabe-Ito, told apart by all common kinds of colour blindness; markers say the same again
STYLE = {
    "frc": ("#D55E00", "o"),
    "snapkv": ("#0072B2", "s"),
    "chunkkv": ("#56B4E9", "D"),
    "pyramidkv": ("#56B4E9", "^"),
    "tova": ("#0072B2", "v"),
    "keydiff": ("#009E73", "P"),
    "knorm": ("#009E73", "X"),
    "lagkv": ("#E69F00", "<"),
    "expected_attention": ("#CC79A7", ">"),
    "observed_attention": ("#CC79A7", "d"),
    "streaming_llm": ("#E69F00", "*"),
    "random": ("#777777", "."),
    FULL: ("#000000", "_"),
}
SPARE = [("#332288", "h"), ("#882255", "p"), ("#117733", "8"), ("#AA4499", "H")]

RC = {
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.5,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.5,
    "svg.hashsalt": "cachecraft",
    "svg.fonttype": "none",
    "figure.dpi": 150,
    "savefig.dpi": 300,
}
COLUMN = 8.5 / 2.54
"""Width of a print column, in inches."""


def style(policy: str) -> tuple[str, str]:
    """(colour, marker) of a policy; a name unknown here gets a spare pair that its spelling decides."""
    return STYLE.get(policy) or SPARE[sum(policy.encode()) % len(SPARE)]


def save(figure: Figure, path: Path | str) -> list[Path]:
    """Write ``<path>.png`` and ``<path>.svg`` without dates, so that equal data gives equal bytes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
        target = path.with_name(path.name + suffix)
        with mpl.rc_context(RC):
            figure.savefig(target, metadata=metadata)
        written.append(target)
    return written


def grid_figure(summary: pd.DataFrame, title: str = "") -> Figure:
    """Score against compression ratio: a panel a (model, length, setting), a line a policy, bars for the intervals.

    Args:
        summary: from :func:`cachecraft_lab.stats.summarise`.
        title: one line above the panels.
    """
    if summary.empty:
        raise InputError("nothing to draw: no task reaches the floor with the full cache, or there are no records")
    columns = list(dict.fromkeys(zip(summary["model"], summary["length"], strict=True)))
    settings = list(dict.fromkeys(summary["setting"]))
    with mpl.rc_context(RC):
        figure = Figure(figsize=(COLUMN * max(1.15, len(columns)), 2.45 * len(settings) + 0.3), layout="constrained")
        axes = figure.subplots(len(settings), len(columns), squeeze=False, sharey=True)
        for i, setting in enumerate(settings):
            for j, (model, length) in enumerate(columns):
                cell = summary[
                    (summary["model"] == model) & (summary["length"] == length) & (summary["setting"] == setting)
                ]
                _grid_panel(axes[i, j], cell, f"{model}, {length} tokens, {setting}")
                if j == 0:
                    axes[i, j].set_ylabel("RULER average (points)")
                if i == len(settings) - 1:
                    axes[i, j].set_xlabel("compression ratio r (fraction of KV pairs removed)")
        if title:
            figure.suptitle(title, fontsize=7.5)
    return figure


def _grid_panel(ax: mpl.axes.Axes, cell: pd.DataFrame, title: str) -> None:
    if cell.empty:
        ax.set_visible(False)
        return
    n_samples, n_tasks = int(cell["n_samples"].max()), int(cell["n_tasks"].max())
    ax.set_title(f"{title}\n{n_samples} samples, {n_tasks} tasks", loc="left")
    compressed = cell[cell["policy"] != FULL]
    ratios = sorted(compressed["ratio"].unique())
    place = {ratio: i for i, ratio in enumerate(ratios)}
    policies = list(dict.fromkeys(compressed["policy"]))
    starts = []
    for k, policy in enumerate(policies):
        line = compressed[compressed["policy"] == policy].sort_values("ratio")
        colour, marker = style(policy)
        main = policy == "frc"
        # small sideways steps keep the intervals of a ratio apart
        x = [place[r] + (k - (len(policies) - 1) / 2) * 0.035 for r in line["ratio"]]
        errors = [(line["score"] - line["low"]).clip(lower=0), (line["high"] - line["score"]).clip(lower=0)]
        ax.errorbar(
            x,
            line["score"],
            yerr=errors,
            color=colour,
            marker=marker,
            elinewidth=0.5,
            linewidth=2 if main else 0.8,
            zorder=5 if main else 3,
        )
        starts.append((line["score"].iloc[0], policy, colour, x[0]))
    _label_starts(ax, starts, x=-0.4)
    full = cell[cell["policy"] == FULL]
    if not full.empty:
        ax.axhline(full["score"].iloc[0], color="black", linestyle="--", linewidth=0.8)
        ax.text(len(ratios) - 0.6, full["score"].iloc[0] + 1, "full cache", fontsize=6, va="bottom", ha="right")
    ax.set_xticks(range(len(ratios)), [f"{r:g}" for r in ratios])
    ax.set_xlim(-0.4 * len(ratios), len(ratios) - 0.6)  # room for the names
    ax.set_ylim(-3, 108)


def _label_starts(ax: mpl.axes.Axes, starts: list[tuple[float, str, str, float]], x: float, gap: float = 7.0) -> None:
    """Names left of the lines, where they lie furthest apart, moved so that none covers another."""
    starts = sorted(starts)
    heights = [score for score, *_ in starts]
    for i in range(1, len(heights)):  # upwards, then back down under the top of the panel
        heights[i] = max(heights[i], heights[i - 1] + gap)
    top = 103.0
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], top)
        top = heights[i] - gap
    for (score, policy, colour, start), height in zip(starts, heights, strict=True):
        weight = "bold" if policy == "frc" else "normal"
        ax.annotate(
            policy.replace("_", " "),
            xy=(start, score),
            xytext=(x, height),
            color=colour,
            fontsize=6,
            fontweight=weight,
            va="center",
            ha="right",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.3, "alpha": 0.6, "relpos": (1, 0.5)},
        )
