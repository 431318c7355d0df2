"""The exceptions meant for the user: what is wrong, where, and how to mend it. One line per mistake."""

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class LaminarError(Exception):
    """A failure whose text is shown to the user as it is, in one line, followed by a non-zero exit."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.split()))


class Refused(LaminarError):
    """What was asked for cannot begin (exit code 2). Its text has one line per mistake, all at once."""

    def __init__(self, lines: Iterable[str]) -> None:
        Exception.__init__(self, "\n".join(" ".join(line.split()) for line in lines))


def of_the_system(error: OSError) -> LaminarError:
    """What the system has refused: a file or folder that this user may not use, a long name, a full disk."""
    if error.filename is None:
        return LaminarError(error.strerror or str(error))
    cure = "let this user read and write there, or name another"
    return LaminarError(f"{error.filename} cannot be used ({error.strerror}); {cure}")


def print_lines(error: LaminarError) -> None:
    """For whoever has started this process."""
    for line in str(error).splitlines():
        print(f"laminar: error: {line}", file=sys.stderr, flush=True)


def said(look: Callable[..., object], *given: Any) -> list[str]:
    """What a look at something refuses, one line each."""
    try:
        look(*given)
    except LaminarError as error:
        return str(error).splitlines()
    return []


class PermanentFailure(LaminarError):
    """Would fail again however often it is started, so `restarts` does not help."""


@contextmanager
def before_it_begins() -> Iterator[None]:
    """Any LaminarError inside becomes Refused: nothing has begun yet."""
    try:
        yield
    except LaminarError as error:
        raise Refused(str(error).splitlines()) from None


def first_line(error: Exception) -> str:
    """Returns the first line of what a library says."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """` (did you mean NAME?)`, or nothing where no name is near."""
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), list(by_lower), 1, 0.6)
    return f" (did you mean {by_lower[close[0]]}?)" if close else ""
