"""The grid: settings that cannot be meant, shards that survive a kill, and what a run folder says of itself."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from tiny import tiny_lm

from cachecraft_lab import grid, store
from cachecraft_lab.errors import InputError
from cachecraft_lab.grid import GridConfig, run_grid
from cachecraft_lab.policies import FRC, make_policy
from cachecraft_lab.ruler import generate
from cachecraft_lab.stats import margins, summarise

CONFIG = GridConfig(
    models=("tiny",),
    lengths=(320,),
    tasks=("niah_single_1", "niah_multikey_2"),
    n_samples=2,
    ratios=(0.5, 0.88),
    policies=("full", {"name": "frc", "window": 16}, "knorm"),
    query_aware=(False, True),
    max_new_tokens=4,
)
SHARDS = [
    f"320-{setting}-{task}-000.parquet"
    for setting in ("query-agnostic", "query-aware")
    for task in ("niah_single_1", "niah_multikey_2")
]
TIMES = ["sample_seconds"]
KEY = ["model", "length", "setting", "task", "sample_id", "policy", "ratio"]


def load(name: str, **settings) -> object:
    """Stands in for load_model: a tiny model, the same every time."""
    return replace(tiny_lm("llama"), name=name)


def pin(monkeypatch=None) -> None:
    """What a commit that lands while the tests run would change, held still (in a child process for good)."""
    put = monkeypatch.setattr if monkeypatch else setattr
    put(store, "git_commit", lambda: "0123456789ab")
    put(store, "source_digest", lambda: "source")


@pytest.fixture(autouse=True)
def pinned(monkeypatch):
    pin(monkeypatch)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run, for tests that only read it."""
    with pytest.MonkeyPatch.context() as patch:
        pin(patch)
        return run_grid(CONFIG, tmp_path_factory.mktemp("finished"), load=load)


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the whole run that a test may damage."""
    folder = tmp_path / "grid" / finished.folders[0].name
    for path in finished.folders[0].rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(finished.folders[0])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return folder


def without_times(records: pd.DataFrame) -> pd.DataFrame:
    return records.drop(columns="sample_seconds")


def never(*args, **kwargs):
    raise AssertionError("a finished shard was computed again")


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("niah_singel_1",)}, "task 'niah_singel_1' is unknown: did you mean 'niah_single_1'"),
        ({"policies": ("full", "snapvk")}, "did you mean 'snapkv'"),
        ({"policies": ({"name": "snapkv", "windw": 3},)}, "'windw'"),
        ({"data": "hubb"}, "data 'hubb' is neither 'generated' nor 'hub'"),
        ({"ratios": (0.5, 1.0)}, "1.0 is outside"),
        ({"ratios": ("0.5",)}, "'0.5' is outside"),
        ({"lengths": (0,)}, "length 0"),
        ({"lengths": ("512",)}, "length '512'"),
        ({"lengths": (512.0,)}, "length 512.0"),
        ({"lengths": (512, 512)}, "lengths repeat"),
        ({"models": ("a", "a")}, "models repeat"),
        ({"policies": ("knorm", "knorm")}, "policies repeat"),
        ({"tasks": ()}, "tasks is empty"),
        ({"models": ()}, "models is empty"),
        ({"n_samples": 0}, "n_samples must be a whole number >= 1, got 0"),
        ({"n_samples": 2.5}, "n_samples .* got 2.5"),
        ({"n_samples": True}, "n_samples .* got True"),
        ({"memory_budget": "2G"}, "memory_budget .* got '2G'"),
        ({"max_new_tokens": 0}, "max_new_tokens .* got 0"),
        ({"max_new_tokens": "8"}, "max_new_tokens .* got '8'"),
        ({"chunk_size": -1}, "chunk_size .* got -1"),
        ({"seed": "one"}, "seed .* got 'one'"),
        ({"query_aware": ("yes",)}, "query_aware .* got 'yes'"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes, message):
    with pytest.raises(InputError, match=message) as error:
        GridConfig(**changes)
    assert "\n" not in str(error.value)


def test_single_values_stand_for_lists_of_one():
    config = GridConfig(models="m", lengths=512, ratios=0.5, policies={"name": "frc", "window": 8}, query_aware=True)
    assert (config.models, config.lengths, config.ratios, config.query_aware) == (("m",), (512,), (0.5,), (True,))
    assert config.policies == ({"name": "frc", "window": 8},)


def test_a_profile_is_read_overridden_and_checked(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("grid:\n  lengths: [256]\n  n_samples: 3\n")
    config = GridConfig.from_profile(str(path), n_samples=5, seed=None)
    assert (config.lengths, config.n_samples, config.seed) == ((256,), 5, 0)  # None leaves the profile's value
    with pytest.raises(InputError, match=r"'n_sample'.*did you mean 'n_samples'"):
        GridConfig.from_profile(str(path), n_sample=5)
    for text, message in (
        ("grid:\n  lenghts: [256]\n", "did you mean 'lengths'"),
        ("lengths: [256]\n", "needs a `grid:` section"),
        ("grid: [1\n", "is not YAML"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message) as error:
            GridConfig.from_profile(str(path))
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"'smok' is unknown: known are .*smoke"):
        GridConfig.from_profile("smok")


def test_a_bad_last_shard_is_found_before_the_first_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "evaluate", never)
    config = replace(CONFIG, lengths=(320, 20))
    with pytest.raises(InputError, match="niah_single_1 needs at least"):
        run_grid(config, tmp_path, load=load)
    with pytest.raises(InputError, match="exceed the 256 positions"):
        run_grid(CONFIG, tmp_path, load=lambda name, **settings: tiny_lm("llama", max_position_embeddings=256))
    assert not list(tmp_path.rglob("*.parquet"))


# --- what a run leaves behind -----------------------------------------------------------------------------------------


def test_shards_records_and_keys(finished):
    (folder,) = finished.folders
    assert sorted(p.name for p in (folder / "records").iterdir()) == sorted(SHARDS)
    records = finished.records()
    assert len(records) == 4 * 2 * (1 + 2 * 2)  # shards x samples x (full + policies x ratios)
    assert not records.duplicated(KEY).any()
    assert (
        set(records["model"]) == {"tiny"} and set(records["length"]) == {320} and set(records["data"]) == {"generated"}
    )
    assert set(records["run"]) == {finished.manifests[0]["config_digest"]} and folder.name.endswith(records["run"][0])
    assert set(records["git_commit"]) == {"0123456789ab"}
    assert (records["context_tokens"] + records["question_tokens"]).between(300, 360).all()
    assert not summarise(records, floor=0).empty and not margins(records, floor=0).empty


def test_manifest_counts_forward_passes_and_names_what_ran(finished):
    manifest = json.loads((finished.folders[0] / "manifest.json").read_text())
    assert manifest == json.loads(json.dumps(finished.manifests[0]))
    counts = manifest["counts"]
    assert (counts["samples"], counts["records"], counts["prefill_forward_passes"]) == (8, 40, 8)  # one a sample
    assert 8 <= counts["decode_forward_passes"] <= 8 * CONFIG.max_new_tokens
    assert (manifest["shards"], manifest["shards_reused"]) == (4, 0)
    assert manifest["git_commit"] == "0123456789ab" and manifest["profile"] == "custom"
    versions = manifest["environment"]["versions"]
    assert {"python", "torch", "transformers", "kvpress", "cachecraft_lab"} <= set(versions)
    assert "not installed" not in [versions[name] for name in ("torch", "transformers", "kvpress")]
    config = manifest["config"]
    assert config["seed"] == 0 and config["tasks"] == list(CONFIG.tasks) and config["source"] == "source"
    assert config["model"]["tokenizer_hash"] and config["model"]["dtype"] == "float32"
    frc = next(p for p in config["policies"] if isinstance(p, dict) and p["name"] == "frc")
    assert frc["window"] == 16 and frc["chunk_length"] == FRC().chunk_length  # parameters left out are there too
    assert json.loads((finished.folders[0] / "config.json").read_text()) == config
    assert os.uname().nodename not in json.dumps(manifest["environment"])


def test_two_runs_give_the_same_records(finished, tmp_path):
    again = run_grid(CONFIG, tmp_path, load=load)
    assert again.folders[0].name == finished.folders[0].name
    pd.testing.assert_frame_equal(without_times(again.records()), without_times(finished.records()))
    for name in SHARDS:  # byte-equal once the times are out
        tables = [
            pq.read_table(r.folders[0] / "records" / name).drop_columns("sample_seconds") for r in (finished, again)
        ]
        assert tables[0].replace_schema_metadata(None).equals(tables[1].replace_schema_metadata(None))


def test_two_models_are_two_folders(tmp_path):
    config = replace(CONFIG, models=("org/one", "two"), tasks=("niah_single_1",), query_aware=(False,))
    done = run_grid(config, tmp_path, load=load)
    assert [f.name.rpartition("-")[0] for f in done.folders] == ["org--one", "two"]
    assert list(dict.fromkeys(done.records()["model"])) == ["org/one", "two"]


# --- resume -----------------------------------------------------------------------------------------------------------


def test_a_second_run_computes_nothing(run, finished, monkeypatch):
    monkeypatch.setattr(grid, "evaluate", never)
    again = run_grid(CONFIG, run.parent.parent, load=load)
    assert again.folders == (run,)
    pd.testing.assert_frame_equal(again.records(), finished.records())  # times too: they are the first run's
    assert again.manifests[0]["shards_reused"] == 4
    assert again.manifests[0]["counts"] == finished.manifests[0]["counts"]  # what the records cost, whoever paid


def damage_none(path: Path) -> None:
    path.unlink()


def damage_stub(path: Path) -> None:
    path.write_bytes(b"\0" * 100)


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def damage_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[200:1200] = b"\xff" * 1000  # the footer still reads
    path.write_bytes(content)


def damage_foreign(path: Path) -> None:
    pd.DataFrame({"x": [1]}).to_parquet(path)  # a sound file that is none of ours


@pytest.mark.parametrize("damage", [damage_none, damage_stub, damage_truncate, damage_middle, damage_foreign])
def test_a_lost_or_damaged_shard_is_done_again_and_nothing_else(run, finished, monkeypatch, capfd, damage):
    victim = run / "records" / SHARDS[1]
    damage(victim)
    done = []
    monkeypatch.setattr(grid, "evaluate", lambda *args, **kw: done.append(kw["query_aware"]) or EVALUATE(*args, **kw))
    again = run_grid(CONFIG, run.parent.parent, load=load)
    assert done == [False]  # one shard
    assert again.manifests[0]["shards_reused"] == 3
    pd.testing.assert_frame_equal(without_times(again.records()), without_times(finished.records()))
    aside = victim.with_name(victim.name + ".damaged")
    assert aside.exists() == (damage is not damage_none)  # kept to be looked at, and said
    assert ("set aside" in capfd.readouterr().err) == (damage is not damage_none)


EVALUATE = grid.evaluate


def test_temporary_files_of_a_dead_writer_are_no_records(run, finished):
    (run / "records" / f".{SHARDS[0]}.123.tmp").write_bytes(b"half")
    read, records = (
        frame.sort_values(KEY, ignore_index=True) for frame in (store.read_records(run), finished.records())
    )
    pd.testing.assert_frame_equal(read, records)


CHILD = """
import os, signal, sys
sys.path[:0] = [{tests!r}]
import test_grid
from cachecraft_lab import store
test_grid.pin()
write, calls = store.pq.write_table, []

def die_in_the_second_shard(table, path, **settings):
    calls.append(path)
    if len(calls) == 2:
        path.write_bytes(b"PAR1" + bytes(500))
        os.kill(os.getpid(), signal.SIGKILL)
    write(table, path, **settings)

store.pq.write_table = die_in_the_second_shard
test_grid.run_grid(test_grid.CONFIG, {out!r}, load=test_grid.load)
"""


def test_a_killed_run_goes_on_where_it_was(finished, tmp_path, monkeypatch):
    """SIGKILL while the second shard is being written: the first stays, the half one is no shard, the rest is run."""
    child = CHILD.format(tests=str(Path(__file__).parent), out=str(tmp_path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    dead = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, env=environment, timeout=120)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    (folder,) = (tmp_path / "grid").iterdir()
    assert folder.name == finished.folders[0].name
    assert [p.name for p in (folder / "records").glob("*.parquet")] == SHARDS[:1]
    assert (folder / "config.json").exists() and not (folder / "manifest.json").exists()  # first and last written
    first = (folder / "records" / SHARDS[0]).read_bytes()
    resumed = run_grid(CONFIG, tmp_path, load=load)
    assert resumed.manifests[0]["shards_reused"] == 1
    assert (folder / "records" / SHARDS[0]).read_bytes() == first
    pd.testing.assert_frame_equal(without_times(resumed.records()), without_times(finished.records()))


# --- what makes another run -------------------------------------------------------------------------------------------


def key_of(config: GridConfig, lm=None, samples=()) -> str:
    return grid.config_digest(config, lm or load("tiny"), dict(samples))[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": (321,)},
        {"tasks": ("niah_single_1",)},
        {"n_samples": 3},
        {"ratios": (0.5, 0.75)},
        {"policies": ("full", {"name": "frc", "window": 17}, "knorm")},
        {"policies": ("full", "knorm")},
        {"query_aware": (False,)},
        {"seed": 1},
        {"data": "hub"},
        {"max_new_tokens": 5},
        {"chunk_size": 100},
        {"dtype": "bfloat16"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_changed_setting_is_another_folder(changes):
    assert key_of(replace(CONFIG, **changes)) != key_of(CONFIG)


def test_settings_that_change_no_record_share_a_folder():
    same = replace(CONFIG, profile="x", memory_budget=1, device_map="auto", models=("tiny", "other"))
    assert key_of(same) == key_of(CONFIG)
    spelled_out = ("full", {"name": "frc", **FRC(window=16).params()}, {"name": "knorm"})
    assert key_of(replace(CONFIG, policies=spelled_out)) == key_of(CONFIG)


def test_another_model_template_or_code_is_another_folder(monkeypatch):
    lm = load("tiny")
    for other in (
        replace(lm, revision="abc"),
        replace(tiny_lm("llama", "eager"), name="tiny"),
        replace(tiny_lm("llama", prompt_format="none"), name="tiny"),
        replace(tiny_lm("qwen3"), name="tiny"),
    ):
        assert key_of(CONFIG, other) != key_of(CONFIG, lm)
    before = key_of(CONFIG)
    monkeypatch.setattr(store, "source_digest", lambda: "changed")
    assert key_of(CONFIG) != before


def test_other_data_under_the_same_path_is_another_folder(tmp_path, monkeypatch):
    """A data set that is read may change where it lies; its records must not mix with those of before."""
    lm, path = load("tiny"), tmp_path / "ruler" / "320.parquet"
    path.parent.mkdir()
    frame = pd.DataFrame(
        [
            {**asdict(s), "answer": list(s.answers)}
            for s in generate("niah_single_1", 320, lm.tokenizer, n_samples=3, seed=5)
        ]
    ).drop(columns=["answers", "id"])
    config = replace(CONFIG, data=str(path.parent), tasks=("niah_single_1",), query_aware=(False,))
    frame.to_parquet(path)
    first = run_grid(config, tmp_path, load=load)
    assert len(first.records()) == 2 * 5 and set(first.records()["data"]) == {str(path.parent)}
    with monkeypatch.context() as patch:
        patch.setattr(grid, "evaluate", never)
        assert run_grid(config, tmp_path, load=load).folders == first.folders
    frame.assign(answer=[["1234"]] * 3).to_parquet(path)
    second = run_grid(config, tmp_path, load=load)
    assert second.folders != first.folders
    assert set(second.records()["answers"]) == {'["1234"]'}


def test_the_source_digest_covers_all_code_on_the_way_to_a_record():
    """Modules that evaluate() and the generator reach by import, but for those whose work the revision digests."""
    elsewhere = {"errors", "embedded", "sources"}
    seen, todo = set(), ["evaluate", "ruler"]
    while todo:
        name = todo.pop()
        path = store.PACKAGE / f"{name}.py"
        if name in seen or not path.exists():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                todo += [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
    assert {"prefill", "ruler_tasks", "ruler_match"} <= seen
    assert seen - elsewhere <= set(store.SHAPES_RECORDS)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path, records = tmp_path / "shard.parquet", pd.DataFrame({"x": [1, 2]})
    store.write_records(path, records, {"run": "one"})
    before = path.read_bytes()

    def full_disk(table, tmp, **settings):
        tmp.write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.pq, "write_table", full_disk)
    with pytest.raises(OSError, match="No space"):
        store.write_records(path, records, {"run": "two"})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["shard.parquet"]
    assert store.read_meta(path) == {"run": "one"}


def test_a_reader_of_the_old_file_never_sees_half_of_the_new(tmp_path):
    path = tmp_path / "shard.parquet"
    store.write_records(path, pd.DataFrame({"x": [1, 2]}), {"run": "one"})
    before = path.read_bytes()
    with open(path, "rb") as reader:
        store.write_records(path, pd.DataFrame({"x": range(9)}), {"run": "two"})
        assert reader.read() == before  # a new file took the name, nothing was written into the old one
    assert store.read_meta(path) == {"run": "two"}


@pytest.mark.parametrize("what", ["missing.parquet", "empty", "damaged.parquet"])
def test_reading_what_is_not_there_is_one_line(tmp_path, what):
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.parquet").write_bytes(b"\0" * 100)
    with pytest.raises(InputError, match=r"no records at|cannot read records") as error:
        store.read_records(tmp_path / what)
    assert "\n" not in str(error.value)


def test_git_commit_marks_a_changed_checkout(tmp_path, monkeypatch):
    monkeypatch.undo()  # the real function, on a checkout of our own
    monkeypatch.setattr(store, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert store.git_commit.__wrapped__() == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    (tmp_path / "a.py").write_text("1\n")
    for arguments in (["init", "-q"], ["add", "a.py"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *arguments], check=True)
    commit = store.git_commit.__wrapped__()
    assert len(commit) == 12 and not commit.endswith("+dirty")
    (tmp_path / "a.py").write_text("2\n")
    assert store.git_commit.__wrapped__() == f"{commit}+dirty"


def test_records_come_in_the_order_of_the_profile(tmp_path):
    """Lengths as numbers and tasks as given, not as file names sort."""
    config = replace(CONFIG, lengths=(1024, 320), tasks=("niah_single_2", "niah_single_1"), query_aware=(False,))
    records = run_grid(
        replace(config, policies=("knorm",), ratios=(0.5,), max_new_tokens=1), tmp_path, load=load
    ).records()
    order = list(dict.fromkeys(zip(records["length"], records["task"], strict=True)))
    assert order == [(length, task) for length in config.lengths for task in config.tasks]


def test_a_shard_holds_a_block_of_samples(tmp_path, monkeypatch):
    """More samples than a block: several files, the same records, and a lost block alone is redone."""
    config = replace(CONFIG, tasks=("niah_single_1",), query_aware=(False,), n_samples=5, policies=("knorm",))
    whole = run_grid(config, tmp_path / "whole", load=load).records()
    monkeypatch.setattr(grid, "BLOCK", 2)
    run = run_grid(config, tmp_path / "blocks", load=load)
    assert run.manifests[0]["files"] == [f"320-query-agnostic-niah_single_1-{k:03d}.parquet" for k in range(3)]
    pd.testing.assert_frame_equal(run.records().drop(columns=TIMES), whole.drop(columns=TIMES))
    (run.folders[0] / "records" / run.manifests[0]["files"][1]).unlink()
    again = run_grid(config, tmp_path / "blocks", load=load)
    assert again.manifests[0]["shards_reused"] == 2
    pd.testing.assert_frame_equal(again.records().drop(columns=TIMES), whole.drop(columns=TIMES))


def test_a_rewritten_policy_class_is_another_run(tmp_path):
    """Of a user's class the source counts, not its fields alone: an edited score must not find the old records."""
    from cachecraft_lab.policies import Policy

    class Mine(Policy):
        name = "mine"

        def score(self, layer, ratio):
            return layer.keys.norm(dim=-1)

    first = Mine().identity()

    class Mine(Policy):
        name = "mine"

        def score(self, layer, ratio):
            return layer.values.norm(dim=-1)

    assert first != Mine().identity() and first["name"] == "mine"
    assert "source" not in make_policy("knorm").identity()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "lower memory_budget"),
        (FloatingPointError("non-finite"), "non-finite"),
    ],
)
def test_a_run_that_cannot_go_on_says_so_in_one_line(tmp_path, monkeypatch, error, says):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(grid, "evaluate", fail)
    with pytest.raises(InputError, match=says) as stop:
        run_grid(CONFIG, tmp_path, load=load)
    assert "\n" not in str(stop.value) and "finished shards are kept" in str(stop.value)
