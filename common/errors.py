"""The errors that are a user's to mend."""


class UserError(ValueError):
    """A mistake in a flag, a file or the way a script was started. The scripts print it as one line and end with exit
    code 2: what is wrong, then what to give instead (`--flag VALUE: what is wrong. What to do.`). Any other exception
    is a defect of this project or of a library, and shows its traceback."""


class StreamError(UserError):
    """A stream cannot be read any further: a broken row far inside the corpus, or a network that is gone."""
