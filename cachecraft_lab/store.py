"""Records on disk: parquet, whole or not there. A reader never sees half a file under a final name."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from .errors import InputError

PACKAGE = Path(__file__).parent
ROOT = PACKAGE.parent
SHAPES_RECORDS = (
    "models", "prompt", "ruler", "ruler_match", "ruler_tasks", "ruler_text",
    "prefill", "features", "select", "compress", "decode", "evaluate",
)  # fmt: skip


def digest(value: Any) -> str:
    """Short sha256 of plain data, the same on any machine (sorted JSON)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def source_digest() -> str:
    """Digest of the modules on the way from sample to record: results of different code never share a folder."""
    files = [PACKAGE / f"{name}.py" for name in SHAPES_RECORDS]
    files += [*sorted((PACKAGE / "policies").rglob("*.py")), *sorted((PACKAGE / "text").glob("*.txt"))]
    text = "".join(path.read_text() for path in files)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def git_commit() -> str:
    """Commit of the checkout when this process first asked (its code was loaded from there): ``+dirty`` if tracked
    files differed, ``unknown`` outside a checkout."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit[:12] + ("+dirty" if status.stdout.strip() else "")


def versions(*names: str) -> dict[str, str]:
    """Installed versions by distribution name."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def environment() -> dict[str, Any]:
    """Versions and machine, for a manifest. No host name, no environment variables."""
    libraries = ("cachecraft_lab", "torch", "transformers", "kvpress", "numpy", "pandas", "datasets", "wonderwords")
    return {
        "versions": {"python": platform.python_version(), **versions(*libraries)},
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def write_json(path: Path, value: Any) -> None:
    """Write plain data as JSON under a temporary name, then rename."""
    _atomically(path, lambda tmp: tmp.write_text(json.dumps(value, indent=2, sort_keys=True, default=str) + "\n"))


def write_records(path: Path, records: pd.DataFrame, meta: dict[str, Any]) -> None:
    """Write records with ``meta`` in the file's own header, under a temporary name, then rename."""
    table = pa.Table.from_pandas(records, preserve_index=False)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), b"cachecraft": json.dumps(meta).encode()})
    _atomically(path, lambda tmp: pq.write_table(table, tmp, compression="zstd"))


def read_meta(path: Path) -> dict[str, Any] | None:
    """The ``meta`` of a whole shard; None if the file is not there or cut, damaged, or not one of ours."""
    try:
        meta = json.loads(pq.read_table(path).schema.metadata[b"cachecraft"])
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
        return None
    return meta


def read_records(paths: Path | str | Iterable[Path | str]) -> pd.DataFrame:
    """Records of a parquet file, of a folder of shards (any depth), or of several of these, in path order.

    Raises:
        InputError: nothing there, or a file that cannot be read.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    files: list[Path] = []
    for path in map(Path, given):
        found = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
        if not found or not all(f.exists() for f in found):
            raise InputError(
                f"no records at {path}: run `cachecraft grid` first, or name a parquet file or a run folder"
            )
        files += found
    try:
        tables = [pq.read_table(file) for file in files]
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"cannot read records ({error}): delete the damaged file and run again") from None
    return pd.concat([table.to_pandas() for table in tables], ignore_index=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged shard so that it is redone and can still be looked at."""
    aside = path.with_name(path.name + ".damaged")
    os.replace(path, aside)
    print(f"damaged shard set aside as {aside}; it is computed again", file=sys.stderr)
    return aside


def _atomically(path: Path, write: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(tmp)
        with open(tmp, "rb") as file:
            os.fsync(file.fileno())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
