"""Parameters that reach nothing are refused before a kernel starts; outputs appear only when whole."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from cachecraft_lab import notebooks
from cachecraft_lab.errors import InputError
from cachecraft_lab.notebooks import (
    NotebookError,
    check_parameters,
    declared_parameters,
    run_all,
    run_notebook,
)

SHIPPED = sorted(notebooks.NOTEBOOKS.glob("*.ipynb"))


def write(path: Path, *sources: str, tagged: tuple[int, ...] = (0,)) -> Path:
    cells = [new_markdown_cell("# title")]
    for i, source in enumerate(sources):
        cells.append(new_code_cell(source, metadata={"tags": ["parameters"] if i in tagged else []}))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path


@pytest.fixture
def no_kernel(monkeypatch):
    def started(*args, **kwargs):
        raise AssertionError("a kernel was about to start")

    monkeypatch.setattr(papermill, "execute_notebook", started)


@pytest.mark.parametrize(
    ("sources", "tagged", "given", "message"),
    [
        (("n = 1", "print(n)"), (), "n", "0 code cells are tagged"),
        (("n = 1", "m = 2", "print(n, m)"), (0, 1), "n", "2 code cells are tagged"),
        (("ratios = []", "print(ratios)"), (0,), "ratio", "did you mean 'ratios'"),
        (("n = 1", "print(1)"), (0,), "n", "no later cell reads parameter 'n'"),
        (("n = 1\nm = n", "print(m)"), (0,), "n", "no later cell reads"),  # derived before the injected cell
        (("n = 1", "n = 2", "print(n)"), (0,), "n", "no later cell reads"),  # hidden by a leftover
        (("n = 1", "def f(n):\n    return n"), (0,), "n", "no later cell reads"),  # a local of that name
        (("print(n)", "n = 1"), (1,), "n", "no later cell reads"),  # read before it is set
    ],
)
def test_a_parameter_that_reaches_nothing_is_refused(tmp_path, no_kernel, sources, tagged, given, message):
    path = write(tmp_path / "a.ipynb", *sources, tagged=tagged)
    with pytest.raises(InputError, match=message) as error:
        run_notebook(path, tmp_path / "out.ipynb", {given: 1})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out.ipynb").exists()


READERS = ["print(n)", "def f():\n    return n", "[n for _ in range(2)]", 'f"{n}"', "n += 1"]


@pytest.mark.parametrize("reader", READERS)
def test_every_way_of_reading_counts(tmp_path, reader):
    check_parameters(write(tmp_path / "a.ipynb", "n: int = 1", "%config x\n!ls", reader), ["n"])


def test_a_file_that_is_no_notebook_is_refused(tmp_path, no_kernel):
    (tmp_path / "a.ipynb").write_text("{")
    with pytest.raises(InputError, match="is not a notebook"):
        run_notebook(tmp_path / "a.ipynb", tmp_path / "out.ipynb")
    with pytest.raises(InputError, match="no notebook at"):
        run_notebook(tmp_path / "b.ipynb", tmp_path / "out.ipynb")


def test_run_all_checks_every_notebook_before_the_first_starts(tmp_path, no_kernel):
    write(tmp_path / "00_a.ipynb", "profile = 'smoke'", "print(profile)")
    write(tmp_path / "01_b.ipynb", "profile = 'smoke'", "print(1)")
    with pytest.raises(InputError, match="01_b"):
        run_all("smoke", tmp_path / "out", folder=tmp_path)
    with pytest.raises(InputError, match="no notebook '07'"):
        run_all("smoke", tmp_path / "out", ["07"], folder=tmp_path)
    with pytest.raises(InputError, match="no notebooks in"):
        run_all("smoke", tmp_path / "out", folder=tmp_path / "out")


def test_run_all_passes_what_a_notebook_declares_and_keeps_what_failed(tmp_path, capsys):
    source = "import sys, pathlib\nprint(profile, out_dir, pathlib.Path.cwd(), sys.executable)"
    write(tmp_path / "00_a.ipynb", "profile, only_here = 'x', 1\nprofile = out_dir = None", source)
    failing = "raise ValueError('broken\\nin two')"
    write(tmp_path / "01_b.ipynb", "profile = 'smoke'", "print(profile)", failing)
    out = tmp_path / "out"
    with pytest.raises(NotebookError, match=r"^01_b.ipynb: In .*ValueError: broken in two.*failed") as error:
        run_all("tiny", out, ["00", "01_b.ipynb"], folder=tmp_path)
    assert "\n" not in str(error.value)
    printed = nbformat.read(out / "notebooks" / "00_a.ipynb", 4).cells[-1].outputs[0].text
    assert printed.split() == ["tiny", str(out), str(tmp_path), sys.executable]
    assert sorted(p.name for p in (out / "notebooks").iterdir()) == ["00_a.ipynb", "01_b.failed.ipynb"]
    progress = capsys.readouterr().out
    assert "[1/2] 00_a.ipynb done in" in progress
    assert "[2/2] 01_b.ipynb" in progress


def test_nbval_ignores_stderr_and_catches_a_changed_score(tmp_path):
    (tmp_path / "conftest.py").write_text((notebooks.NOTEBOOKS / "conftest.py").read_text())
    prints = "print('frc 61.0')\nprint('new warning', file=sys.stderr)\nprint('end')"
    noisy = f"# NBVAL_CHECK_OUTPUT\nimport sys\n{prints}"
    for name, recorded in {"same": "frc 61.0\nend\n", "moved": "frc 62.0\nend\n"}.items():
        path = write(tmp_path / f"{name}.ipynb", noisy, tagged=())
        notebook = nbformat.read(path, 4)
        notebook.cells[1].execution_count = 1
        notebook.cells[1].outputs = [nbformat.v4.new_output("stream", name="stdout", text=recorded)]
        nbformat.write(notebook, path)
    nbval = [sys.executable, "-m", "pytest", "-q", "--nbval-lax", "--nbval-current-env"]
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
    run = subprocess.run(nbval, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert "1 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    assert "FAILED moved.ipynb" in run.stdout


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_notebooks_read_every_parameter_they_declare(path):
    declared = declared_parameters(path)  # raises unless exactly one cell is tagged
    assert "profile" in declared
    assert [name for name, read in declared.items() if not read] == []


def test_a_profile_given_by_path_is_found_from_the_notebooks_folder(tmp_path, monkeypatch):
    passed = []
    monkeypatch.setattr(notebooks, "run_notebook", lambda path, output, parameters: passed.append(parameters) or output)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.ipynb", "profile = 'smoke'", "print(profile)")
    run_all("mine/own.yaml", tmp_path / "out", folder=tmp_path)
    run_all("smoke", tmp_path / "out", folder=tmp_path)
    assert [p["profile"] for p in passed] == [str(tmp_path / "mine" / "own.yaml"), "smoke"]
