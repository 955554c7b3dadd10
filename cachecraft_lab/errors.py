"""Errors that a command line shows as one line."""


class InputError(ValueError):
    """Bad input. The message is one line that names the input and the fix; raised before any long work."""


class NotebookError(RuntimeError):
    """A notebook's cell failed. The message is one line: notebook, cell, error, and the part that ran."""
