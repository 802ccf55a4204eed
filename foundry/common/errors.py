"""Errors that the user can correct."""


class UserError(ValueError):
    """A mistake in a flag, in a file or in the way a script was started.

    The scripts print it as one line, `--flag VALUE: what is wrong. What to do.`, and end with exit code 2. Any other
    exception is a defect of this project or of a library, and shows its traceback.
    """


class StreamError(UserError):
    """A stream cannot be read further, such as at a broken row or without a network."""
