"""The grid experiment: {models} x {lengths} x {settings} x {tasks}, every policy at every ratio, resumable.

A shard is a block of samples of one (model, length, setting, task). It is written whole as it ends; a second run goes
on after the last whole shard. A run's folder carries the digest of all that shapes its records, so runs of two
configurations, models, code or library versions never mix.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from tqdm import tqdm

from . import store
from .errors import InputError, check_known
from .evaluate import FULL, SETTINGS, Counts, check_plan, evaluate
from .models import LoadedModel, load_model
from .policies import make_policy
from .policies.kvpress import check_kvpress
from .ruler import TASKS, RulerSample, generate, load_hub
from .select import check_ratio
from .sources import find_source

PROFILES = store.ROOT / "data" / "profiles"
BLOCK = 25
"""Samples a shard at most: what a stop can lose."""


@dataclass(frozen=True)
class GridConfig:
    """Settings of a grid; a profile file holds the same names under ``grid:``.

    Attributes:
        models: names for :func:`~cachecraft_lab.models.load_model`.
        lengths: prompt lengths in tokens (context, question and answer prefix).
        tasks: RULER task names.
        n_samples: samples a (length, task).
        ratios: compression ratios, the fraction of KV pairs removed.
        policies: names or ``{"name": ..., parameter: value}``; ``full`` is the uncompressed cache.
        query_aware: settings to run: False compresses the context and then asks, True the question too.
        seed: of the generator.
        data: ``generated``, ``hub`` for ``simonjegou/ruler`` (config = length), or a folder of parquet in its layout.
        data_revision: commit of the hub's data set; None takes the newest (its digits stand in every sample id).
        max_new_tokens: cap on a task's own limit; None for none.
        dtype, device, attn_implementation, device_map: given to ``load_model``.
        chunk_size: tokens a prefill call; None takes the context whole.
        memory_budget: bytes of gathered caches that decode holds at a time.
    """

    models: tuple[str, ...] = ("smollm2-135m",)
    lengths: tuple[int, ...] = (512,)
    tasks: tuple[str, ...] = ("niah_single_1",)
    n_samples: int = 2
    ratios: tuple[float, ...] = (0.5, 0.75, 0.88)
    policies: tuple[Any, ...] = (FULL, "frc")
    query_aware: tuple[bool, ...] = (False,)
    seed: int = 0
    data: str = "generated"
    data_revision: str | None = None
    max_new_tokens: int | None = None
    dtype: str | None = None
    device: str | None = None
    attn_implementation: str | None = None
    device_map: str | None = None
    chunk_size: int | None = None
    memory_budget: int = 2 * 2**30
    profile: str = field(default="custom", compare=False)

    def __post_init__(self) -> None:
        for name in ("models", "lengths", "tasks", "ratios", "policies", "query_aware"):
            value = getattr(self, name)
            if isinstance(value, (str, dict)) or not hasattr(value, "__iter__"):
                value = (value,)
            if not tuple(value):
                raise InputError(f"{name} is empty: give at least one")
            if len({repr(entry) for entry in value}) != len(tuple(value)):
                raise InputError(f"{name} repeat: {list(value)}")
            object.__setattr__(self, name, tuple(value))
        for name in ("n_samples", "memory_budget"):
            if not _is_count(getattr(self, name)):
                raise InputError(f"{name} must be a whole number >= 1, got {getattr(self, name)!r}")
        for name in ("max_new_tokens", "chunk_size"):
            if getattr(self, name) is not None and not _is_count(getattr(self, name)):
                raise InputError(f"{name} must be a whole number >= 1 or None, got {getattr(self, name)!r}")
        if not isinstance(self.seed, int):
            raise InputError(f"seed must be a whole number, got {self.seed!r}")
        for length in self.lengths:
            if not _is_count(length):
                raise InputError(f"length {length!r} is not a whole number of tokens >= 1")
        for task in self.tasks:
            check_known("task", task, (*TASKS, "qa_1", "qa_2"))  # of these two only the hub has RULER's own data
        for ratio in self.ratios:
            check_ratio(ratio)
        for aware in self.query_aware:
            if aware not in (True, False):
                raise InputError(f"query_aware takes true, false or a list of both, got {aware!r}")
        if self.data not in ("generated", "hub") and not Path(str(self.data)).exists():
            raise InputError(f"data {self.data!r} is neither 'generated' nor 'hub' nor a folder or file that exists")
        for spec in self.policies:
            if spec != FULL:
                make_policy(spec)

    @classmethod
    def from_profile(cls, profile: str, **overrides: Any) -> GridConfig:
        """The ``grid:`` part of data/profiles/<profile>.yaml (or of a YAML path), with what is not None replaced."""
        settings = load_profile(profile)["grid"]
        names = [f.name for f in dataclasses.fields(cls) if f.name != "profile"]
        given = {name: value for name, value in overrides.items() if value is not None}
        for name in [*settings, *given]:
            check_known(f"grid setting in profile {profile!r}", name, names)
        return cls(**{**settings, **given, "profile": str(profile)})


def load_profile(profile: str) -> dict[str, Any]:
    """A profile's YAML as a dict, by name (data/profiles) or path."""
    path = Path(profile) if str(profile).endswith((".yaml", ".yml")) else PROFILES / f"{profile}.yaml"
    if not path.exists():
        known = sorted(p.stem for p in PROFILES.glob("*.yaml"))
        raise InputError(
            f"profile {profile!r} is unknown: known are {', '.join(known)}, or give a path to a .yaml file"
        )
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise InputError(f"profile {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not isinstance(content.get("grid"), dict):
        raise InputError(f"profile {path} needs a `grid:` section of settings")
    return content


@dataclass(frozen=True)
class GridRun:
    """What a grid left behind.

    Attributes:
        folders: one run folder a model, each with ``config.json``, ``records/*.parquet`` and ``manifest.json``.
        manifests: the contents of the manifests.
    """

    folders: tuple[Path, ...]
    manifests: tuple[dict[str, Any], ...]

    def records(self) -> pd.DataFrame:
        """All records, in the order of the profile's lengths, settings and tasks."""
        return store.read_records(
            folder / "records" / file
            for folder, manifest in zip(self.folders, self.manifests, strict=True)
            for file in manifest["files"]
        )


def run_grid(
    config: GridConfig,
    out_dir: Path | str = "runs",
    *,
    load: Callable[..., LoadedModel] = load_model,
) -> GridRun:
    """Run what is missing of a grid and return all of it. Ctrl-C loses the shard in flight, no more.

    Each model is loaded once, its run folder is ``<out_dir>/grid/<model>-<digest>``.
    """
    check_kvpress()
    if load is load_model:
        for name in config.models:  # the last one's missing files must not show up after the first one's days
            find_source(name)
    folders, manifests = [], []
    for name in config.models:
        lm = load(
            name,
            dtype=config.dtype,
            device=config.device,
            attn_implementation=config.attn_implementation,
            device_map=config.device_map,
        )
        folder, manifest = _run_model(config, lm, Path(out_dir))
        folders.append(folder)
        manifests.append(manifest)
        del lm  # or the next one's weights would have to fit beside it
        gc.collect()
        torch.cuda.empty_cache()
    return GridRun(tuple(folders), tuple(manifests))


@dataclass(frozen=True)
class Shard:
    """A block of samples of one (length, setting, task), and the file its records go to."""

    length: int
    query_aware: bool
    task: str
    samples: list[RulerSample]
    file: str


def shards(config: GridConfig, samples: dict[tuple[int, str], list[RulerSample]]) -> list[Shard]:
    """The shards of one model in the order they run; ``samples`` by (length, task)."""
    return [
        Shard(
            length,
            aware,
            task,
            samples[length, task][start : start + BLOCK],
            f"{length}-{SETTINGS[aware]}-{task}-{start // BLOCK:03d}.parquet",
        )
        for length in config.lengths
        for aware in config.query_aware
        for task in config.tasks
        for start in range(0, len(samples[length, task]), BLOCK)
    ]


def samples_of(config: GridConfig, lm: LoadedModel, length: int, task: str) -> list[RulerSample]:
    """The samples of a shard: generated, or the first rows of config ``length`` of the data set."""
    if config.data == "generated":
        return generate(task, length, lm.tokenizer, n_samples=config.n_samples, seed=config.seed)
    path = None if config.data == "hub" else config.data
    return load_hub(length, tasks=[task], revision=config.data_revision, path=path)[: config.n_samples]


def config_digest(
    config: GridConfig, lm: LoadedModel, samples: dict[tuple[int, str], list[RulerSample]]
) -> tuple[dict[str, Any], str]:
    """All that shapes one model's records, the samples' own text included, and its digest."""
    settings = dataclasses.asdict(config)
    for name in ("profile", "models", "memory_budget", "device_map"):  # these change no record
        settings.pop(name)
    settings["policies"] = [FULL if spec == FULL else make_policy(spec).identity() for spec in config.policies]
    made = [dataclasses.asdict(sample) for rows in samples.values() for sample in rows]
    settings |= {"model": lm.describe(), "source": store.source_digest(), "samples": store.digest(made)}
    settings["versions"] = store.versions("torch", "transformers", "kvpress")
    return settings, store.digest(settings)


def _run_model(config: GridConfig, lm: LoadedModel, out_dir: Path) -> tuple[Path, dict[str, Any]]:
    samples = {
        (length, task): samples_of(config, lm, length, task) for length in config.lengths for task in config.tasks
    }
    settings, key = config_digest(config, lm, samples)
    folder = out_dir / "grid" / f"{lm.name.strip('/').replace('/', '--')}-{key}"
    plan = shards(config, samples)
    # every shard's prompts are made and checked before the first runs: a bad one must not show up hours later
    for shard in plan:
        check_plan(
            lm,
            shard.samples,
            config.policies,
            config.ratios,
            query_aware=shard.query_aware,
            max_new_tokens=config.max_new_tokens,
        )
    store.write_json(folder / "config.json", settings)
    total, reused, started, computed = Counts(), 0, time.perf_counter(), 0
    n_samples = sum(len(shard.samples) for shard in plan)
    bar = tqdm(total=n_samples, desc=lm.name, unit="sample", disable=None, file=sys.stderr)
    for number, shard in enumerate(plan, start=1):
        path = folder / "records" / shard.file
        meta = store.read_meta(path)
        if meta is None:
            if path.exists():
                store.set_aside(path)
            meta = _run_shard(config, lm, key, shard, path, bar)
            computed += len(shard.samples)
            spent = time.perf_counter() - started
            left = spent / computed * (n_samples - total.samples - len(shard.samples))
            word = f"done, {spent / 60:.1f} min so far, about {left / 60:.1f} left"
        else:
            bar.update(len(shard.samples))
            reused += 1
            word = "already there"
        total.add(Counts(**meta["counts"]))
        tqdm.write(f"[{number}/{len(plan)}] {lm.name} {path.stem}: {word}", file=sys.stderr)
    bar.close()
    manifest = {
        "config": settings,
        "config_digest": key,
        "profile": config.profile,
        "git_commit": store.git_commit(),
        "environment": store.environment(),
        "shards": len(plan),
        "shards_reused": reused,
        "files": [shard.file for shard in plan],
        "counts": dataclasses.asdict(total),
    }
    store.write_json(folder / "manifest.json", manifest)
    return folder, manifest


def _run_shard(config: GridConfig, lm: LoadedModel, key: str, shard: Shard, path: Path, bar: tqdm) -> dict[str, Any]:
    counts, started = Counts(), time.perf_counter()
    try:
        records = evaluate(
            lm,
            shard.samples,
            config.policies,
            config.ratios,
            query_aware=shard.query_aware,
            max_new_tokens=config.max_new_tokens,
            memory_budget=config.memory_budget,
            chunk_size=config.chunk_size,
            counts=counts,
            progress=lambda sample: bar.update(1),
        )
    except torch.OutOfMemoryError:
        raise InputError(
            f"{lm.name} ran out of GPU memory in {path.stem}: lower memory_budget (now {config.memory_budget} bytes of "
            "gathered caches) or set chunk_size (tokens a prefill call); finished shards are kept"
        ) from None
    except FloatingPointError as error:
        raise InputError(f"{lm.name}, {path.stem}: {error}; finished shards are kept") from None
    records.insert(0, "run", key)
    records.insert(1, "git_commit", store.git_commit())
    records.insert(2, "length", shard.length)
    records.insert(3, "data", config.data)
    meta = {"run": key, "seconds": time.perf_counter() - started, "counts": dataclasses.asdict(counts)}
    store.write_records(path, records, meta)
    return meta


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
