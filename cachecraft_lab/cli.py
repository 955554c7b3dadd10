"""``cachecraft``: the notebooks' experiments from a shell. Every command forwards to one public function."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import typer

from .errors import InputError, NotebookError

app = typer.Typer(
    help="Check, explore and extend KV cache eviction policies (CacheCraft, arXiv:2608.14555).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Profile = Annotated[str, typer.Option(help="smoke, embedded, paper, or a path to a YAML file.")]
Out = Annotated[Path, typer.Option(help="Folder for what is made.")]


@app.command()
def notebooks(
    profile: Profile = "smoke",
    out: Annotated[Optional[Path], typer.Option(help="Default: runs/<profile>.")] = None,  # noqa: UP045
) -> None:
    """Run every notebook by papermill; executed copies and figures go to the output folder."""
    from .grid import load_profile
    from .notebooks import run_all

    load_profile(profile)  # a wrong name fails here and not in a kernel
    with _stoppable():
        run_all(profile, out or Path("runs") / Path(profile).stem)


@app.command()
def grid(
    profile: Profile = "smoke",
    out: Annotated[Optional[Path], typer.Option(help="Default: runs/<profile>, as for notebooks.")] = None,  # noqa: UP045
    n_samples: Annotated[Optional[int], typer.Option(help="Samples a task instead of the profile's.")] = None,  # noqa: UP045
) -> None:
    """Run the grid (what is missing of it) and print scores and FRC's margin over the best baseline.

    Example: cachecraft grid --profile smoke --n-samples 4
    """
    from .grid import GridConfig, run_grid
    from .stats import margins, summarise

    with _stoppable():
        run = run_grid(GridConfig.from_profile(profile, n_samples=n_samples), out or Path("runs") / Path(profile).stem)
    records = run.records()
    typer.echo(summarise(records).to_string(index=False, float_format="%.1f"))
    table = margins(records)
    if not table.empty:
        typer.echo(table[table["best"]].to_string(index=False, float_format="%.1f"))
    for folder in run.folders:
        typer.echo(f"records: {folder}")


@app.command()
def figures(out: Out = Path("figures")) -> None:
    """Redraw the published figures from data/ alone, without a model."""
    from .publish import draw_figures

    for path in draw_figures(out):
        typer.echo(path)


@app.command()
def publish(
    run: Annotated[Path, typer.Argument(help="A run folder of `cachecraft grid` (with config.json and records/).")],
    name: Annotated[str, typer.Option(help="Name of the result set in data/.")] = "embedded",
) -> None:
    """Pack a finished run's records into data/results/<name>.parquet with its manifest; print the README's table."""
    from .publish import margin_table, pack
    from .store import read_records

    path = pack(run, name)
    typer.echo(f"{path}\n{margin_table(read_records(path))}")


@app.command()
def policies() -> None:
    """List the policies that a grid can name, with their parameters and papers."""
    from .policies import make_policy, policy_names

    for name in policy_names():
        policy = make_policy(name)
        summary = " ".join((type(policy).__doc__ or "").split(".")[0].split())
        parameters = ", ".join(f"{key}={value}" for key, value in policy.params().items())
        typer.echo(f"{name}  [{policy.paper or 'no paper'}]  {summary}.\n    {parameters or 'no parameters'}")


@contextmanager
def _stoppable() -> Iterator[None]:
    """Ctrl-C ends long work with what is kept and how to go on, exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("cachecraft: stopped; finished shards are kept, run the same command to go on", err=True)
        raise typer.Exit(130) from None


def main() -> None:
    """Entry point: bad input is one line on stderr and exit code 2, a failed notebook one line and 1."""
    try:
        app()
    except InputError as error:
        typer.echo(f"cachecraft: {error}", err=True)
        sys.exit(2)
    except NotebookError as error:
        typer.echo(f"cachecraft: {error}", err=True)
        sys.exit(1)
