"""Published results: records packed into data/, and every figure that is drawn from them."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from . import figures, store
from .errors import InputError
from .stats import margins, summarise

RESULTS = store.ROOT / "data" / "results"


def pack(run: Path, name: str, out: Path = RESULTS) -> Path:
    """Copy a finished run's records into one small parquet file, its manifest beside it.

    Raises:
        InputError: the run has no manifest (not finished) or no records.
    """
    manifest = Path(run) / "manifest.json"
    if not manifest.exists():
        raise InputError(f"{run} has no manifest.json: finish it with `cachecraft grid` first")
    target = Path(out) / f"{name}.parquet"
    content = json.loads(manifest.read_text())
    store.write_records(target, store.read_records(Path(run) / "records"), {"run": content["config_digest"]})
    store.write_json(target.with_suffix(".manifest.json"), content)
    return target


def published(name: str = "embedded", folder: Path = RESULTS) -> pd.DataFrame:
    """Records of a published result set."""
    return store.read_records(Path(folder) / f"{name}.parquet")


def draw_figures(out: Path | str = "figures") -> list[Path]:
    """Every published figure from data/ alone: PNG and SVG."""
    records = published("embedded")
    return figures.save(figures.grid_figure(summarise(records)), Path(out) / "grid_embedded")


def margin_table(records: pd.DataFrame, *, lowest_ratio: float = 0.75) -> str:
    """FRC against the best baseline of each (model, length, setting, ratio) from ``lowest_ratio`` on, as Markdown.

    The README's results table is this text; a test fails when the two disagree.
    """
    scores = summarise(records).set_index(["model", "length", "setting", "policy", "ratio"])["score"]
    table = margins(records)
    table = table[table["best"] & (table["ratio"] >= lowest_ratio)]
    lines = [
        "| setting | tokens | r | FRC | best baseline | margin (95 % interval) | FRC is |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in table.itertuples():
        cell = (row.model, row.length, row.setting)
        lines.append(
            f"| {row.setting} | {row.length} | {row.ratio:g} | {scores[(*cell, 'frc', row.ratio)]:.1f} "
            f"| {row.baseline} {scores[(*cell, row.baseline, row.ratio)]:.1f} "
            f"| {row.margin:+.1f} ({row.low:+.1f} to {row.high:+.1f}) | {row.verdict} |"
        )
    return "\n".join(lines)
