"""Run notebooks in batch: papermill, made strict about parameters.

papermill only warns when a parameter's name is unknown or the `parameters` cell lost its tag, then runs the
defaults and exits 0. Here both, and a parameter that nothing reads, are an `InputError` before a kernel
starts.
"""

from __future__ import annotations

import ast
import difflib
import os
import symtable
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import papermill
from IPython.core.inputtransformer2 import TransformerManager
from papermill.exceptions import PapermillExecutionError

from .errors import InputError, NotebookError

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
TAG = "parameters"


def declared_parameters(path: str | Path) -> dict[str, bool]:
    """Names assigned in the cell tagged `parameters`, each with whether a later code cell reads it.

    Raises InputError unless exactly one code cell has the tag.
    """
    path = Path(path)
    cells = _code_cells(path)
    tagged = [i for i, (_, _, tags) in enumerate(cells) if TAG in tags]
    if len(tagged) != 1:
        raise InputError(f"{path}: {len(tagged)} code cells are tagged '{TAG}'; tag just the one of defaults")
    names = _assigned(cells[tagged[0]][1])
    later = [_names(source) for _, source, _ in cells[tagged[0] + 1 :]]
    return {name: _is_read(name, later) for name in names}


def check_parameters(path: str | Path, parameters: Iterable[str]) -> None:
    """Raise InputError for a name that the `parameters` cell does not assign, or that no later cell reads."""
    declared = declared_parameters(path)
    for name in parameters:
        if name not in declared:
            raise InputError(f"{path}: no parameter '{name}'{_nearest(name, declared)}")
        if not declared[name]:
            raise InputError(f"{path}: no later cell reads parameter '{name}'; use it or do not pass it")


def run_notebook(path: str | Path, output: str | Path, parameters: Mapping[str, Any] | None = None) -> Path:
    """Execute notebook `path` with `parameters` in its own folder and write it, outputs and all, to `output`.

    `output` appears only when every cell has run. On failure NotebookError is raised and what did run is kept
    beside it as `*.failed.ipynb`. What cells print is passed on to this process's stderr.
    """
    path, output = Path(path).resolve(), Path(output).resolve()
    parameters = dict(parameters or {})
    check_parameters(path, parameters)
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f".{output.stem}.{os.getpid()}.part.ipynb")
    failed = output.with_name(f"{output.stem}.failed.ipynb")
    try:
        with _own_kernel():
            papermill.execute_notebook(
                path,
                part,
                parameters,
                kernel_name="python3",
                language="python",
                progress_bar=False,  # the bars that matter are the cells' own, passed on below
                stdout_file=sys.stderr,
                stderr_file=sys.stderr,
                cwd=path.parent,
                extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns of loopback TCP at every start
            )
    except BaseException as error:
        if part.exists():
            os.replace(part, failed)
        if not isinstance(error, Exception):
            raise
        raise NotebookError(f"{path.name}: {_one_line(error)}; the part that ran: {failed}") from error
    os.replace(part, output)
    failed.unlink(missing_ok=True)
    return output


def run_all(
    profile: str,
    out_dir: str | Path,
    only: Iterable[str] | None = None,
    *,
    folder: str | Path = NOTEBOOKS,
) -> list[Path]:
    """Run the notebooks of `folder` in order of name into `out_dir`/notebooks; returns the written paths.

    profile and out_dir (made absolute) are passed to the notebooks that declare a parameter of that name.
    only: names or their beginnings, such as "02". All notebooks are checked before the first one starts.
    """
    out_dir = Path(out_dir).resolve()
    if str(profile).endswith((".yaml", ".yml")):
        profile = str(Path(profile).resolve())  # a kernel runs in the notebook's folder
    jobs = []
    for path in _choose(find_notebooks(folder), only):
        declared = declared_parameters(path)
        parameters = {k: v for k, v in {"profile": profile, "out_dir": str(out_dir)}.items() if k in declared}
        check_parameters(path, parameters)
        jobs.append((path, parameters))
    written = []
    for i, (path, parameters) in enumerate(jobs, start=1):
        print(f"[{i}/{len(jobs)}] {path.name}, profile {profile}", flush=True)
        start = time.perf_counter()
        written.append(run_notebook(path, out_dir / "notebooks" / path.name, parameters))
        print(f"[{i}/{len(jobs)}] {path.name} done in {time.perf_counter() - start:.0f} s", flush=True)
    return written


def find_notebooks(folder: str | Path = NOTEBOOKS) -> list[Path]:
    """The notebooks of `folder` sorted by name; InputError when there is none."""
    found = sorted(Path(folder).glob("*.ipynb"))
    if not found:
        raise InputError(f"no notebooks in {folder}; run from a checkout installed with `make setup`")
    return found


def _choose(paths: list[Path], only: Iterable[str] | None) -> list[Path]:
    if only is None:
        return paths
    chosen = set()
    for name in only:
        stem = name.removesuffix(".ipynb")
        matches = [p for p in paths if p.stem.startswith(stem)]
        if not stem or not matches:
            raise InputError(f"no notebook '{name}'{_nearest(name, [p.stem for p in paths])}")
        chosen.update(matches)
    return [p for p in paths if p in chosen]


def _code_cells(path: Path) -> list[tuple[int, str, list[str]]]:
    """(position, plain Python source, tags) of each code cell."""
    if not path.is_file():
        raise InputError(f"no notebook at {path}; check the path")
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:
        raise InputError(f"{path} is not a notebook: {_one_line(error)}") from error
    plain = TransformerManager().transform_cell  # magics and shell lines become calls
    cells = []
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        source = plain(cell.source)
        try:
            ast.parse(source)
        except SyntaxError as error:
            raise InputError(f"{path}: cell {i + 1} does not parse: {error.msg}") from error
        cells.append((i, source, cell.metadata.get("tags", [])))
    return cells


def _assigned(source: str) -> list[str]:
    """Names that top-level assignments of `source` bind, in order."""
    names = []
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names += [t.id for t in targets if isinstance(t, ast.Name) and not isinstance(node, ast.For)]
    return list(dict.fromkeys(names))


def _names(source: str) -> tuple[set[str], set[str]]:
    """(global names read, global names assigned) by one cell; a function's own locals are neither."""
    table = symtable.symtable(source, "<cell>", "exec")
    reads = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    steps = [node.target for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AugAssign)]
    reads |= {t.id for t in steps if isinstance(t, ast.Name)}  # `n += 1` reads n, which symtable does not say
    for inner in _descendants(table):
        reads |= {s.get_name() for s in inner.get_symbols() if s.is_global() and s.is_referenced()}
    return reads, {s.get_name() for s in table.get_symbols() if s.is_assigned()}


def _descendants(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _descendants(child)


def _is_read(name: str, cells: list[tuple[set[str], set[str]]]) -> bool:
    """Whether the first cell that uses the name reads it; one that only assigns it hides the parameter."""
    for reads, assigns in cells:
        if name in reads or name in assigns:
            return name in reads
    return False


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known) or 'none'}"


def _one_line(error: BaseException) -> str:
    if isinstance(error, PapermillExecutionError):
        text = f"In [{error.exec_count}] {error.ename}: {error.evalue}"
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())


@contextmanager
def _own_kernel() -> Iterator[None]:
    """Let "python3" mean this interpreter's ipykernel, whatever kernels the user's folders name so."""
    before = os.environ.get("JUPYTER_PATH")
    own = str(Path(sys.prefix, "share", "jupyter"))
    os.environ["JUPYTER_PATH"] = own if before is None else own + os.pathsep + before
    try:
        yield
    finally:
        if before is None:
            del os.environ["JUPYTER_PATH"]
        else:
            os.environ["JUPYTER_PATH"] = before
