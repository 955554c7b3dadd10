"""The one exception that means "your input, not our code"."""


class InputError(ValueError):
    """Bad input. The message is one line that names the input and the fix; raised before any long work."""
