"""What `laminar doctor` says of one thing."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report. `level` is ok, warn or FAIL; `cure` is empty where nothing is to be done."""

    level: str
    what: str
    value: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.what}: {self.value}" + (f"  ({self.cure})" if self.cure else "")


def warned(what: str, value: str, cure: str) -> Finding:
    """Well where there is no cure to name."""
    return Finding("warn" if cure else "ok", what, value, cure)


def size_text(count: int) -> str:
    """Bytes, for a line of the report."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
