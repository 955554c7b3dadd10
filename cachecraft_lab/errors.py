"""Errors that a command line shows as one line."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input. The message is one line that names the input and the fix; raised before any long work."""


class NotebookError(RuntimeError):
    """A notebook's cell failed. The message is one line: notebook, cell, error, and the part that ran."""


def check_known(kind: str, name: object, known: Iterable[str]) -> None:
    """Refuse a name that is not known, offering the nearest one that is."""
    known = [str(k) for k in known]
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"{kind} {name!r} is unknown: {hint}known are {', '.join(known)}")
