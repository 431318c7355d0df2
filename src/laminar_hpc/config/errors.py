"""The exceptions meant for the user: what is wrong, where, and how to mend it. One line per mistake."""

from collections.abc import Iterable


class LaminarError(Exception):
    """A failure whose text is shown to the user as it is, in one line, followed by a non-zero exit."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.split()))


class Refused(LaminarError):
    """What was asked for cannot begin (exit code 2). Its text has one line per mistake, all of them at
    once."""

    def __init__(self, lines: Iterable[str]) -> None:
        Exception.__init__(self, "\n".join(" ".join(line.split()) for line in lines))


class PermanentFailure(LaminarError):
    """Would fail again however often it is started, so `restarts` does not help."""
