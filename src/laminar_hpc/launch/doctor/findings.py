"""Tables of checks: `laminar doctor` has one of packages and one of the machine, `laminar slurm check` one of
all nodes of an allocation."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

GIB = 2**30


class Verdict(NamedTuple):
    """What a check has found. `level` is ok, warn or FAIL; `cure` stands in for the row's own."""

    level: str
    value: str
    cure: str = ""


def ok(value: str, cure: str = "") -> Verdict:
    return Verdict("ok", value, cure)


def warn(value: str, cure: str = "") -> Verdict:
    return Verdict("warn", value, cure)


def fail(value: str, cure: str = "") -> Verdict:
    return Verdict("FAIL", value, cure)


class MachineFinding(NamedTuple):
    what: str
    verdict: Verdict

    def __str__(self) -> str:
        level, value, cure = self.verdict
        return f"{level:<5} {self.what}: {value}" + (f"  ({cure})" if cure else "")


class CheckTable(list[tuple[str, str, Callable[..., Verdict | None]]]):
    """Rows: the name, the cure of whatever is not ok, and what gives the answer; None: nothing to say."""

    def row(self, name: str, cure: str = "") -> Callable[[Any], Any]:
        """Makes a function the next row."""

        def add(run: Callable[..., Verdict | None]) -> Callable[..., Verdict | None]:
            self.append((name, cure, run))
            return run

        return add

    def findings(self, *given: Any) -> Iterator[MachineFinding]:
        """Yields the findings of each row, whose function takes what is given."""
        for name, cure, run in self:
            if (answer := run(*given)) is not None:
                own = answer.cure or answer.level == "ok"
                yield MachineFinding(name, answer if own else answer._replace(cure=cure))


def report(findings: Iterable[MachineFinding]) -> int:
    """Prints them; 1 if one says FAIL, else 0."""
    failed = False
    for finding in findings:
        print(finding, flush=True)
        failed |= finding.verdict.level == "FAIL"
    return int(failed)


def size_text(count: int) -> str:
    """Bytes, for a line of the report."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
