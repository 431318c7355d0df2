"""The one exception that is meant for the user: one line with what is wrong, where, and how to mend it."""


class LaminarError(Exception):
    """A failure whose text is shown to the user as it is, in one line, followed by a non-zero exit."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.split()))


class Refused(LaminarError):
    """Refused before anything began: exit code 2, and nothing was changed."""


class PermanentFailure(LaminarError):
    """Would fail again however often it is started: never restarted."""
