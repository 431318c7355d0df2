"""Which Python runs the user's functions: ours, or another with packages that cannot live beside ours.

The other one runs our worker's code too (process.py and what it imports), which it is given by its path
(elsewhere.py). So it needs what that code needs, and none of our other packages.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.errors import LaminarError

OLDEST = (3, 11)
NEEDED = {"msgspec": (0, 18), "pydantic": (2, 0)}  # packages of the worker, and their oldest versions
_PROBE_SECONDS = 60.0
_ITS_OWN = ("PYTHONHOME", "VIRTUAL_ENV")  # say where ours lives
# one word each: the version, then NAME=VERSION of the packages that are there
_PROBE = """
import sys
print("%d.%d" % sys.version_info[:2])
from importlib import metadata
for name in sys.argv[1:]:
    try: print("%s=%s" % (name, metadata.version(name)))
    except metadata.PackageNotFoundError: pass
"""


@dataclass(frozen=True)
class Interpreter:
    """`path`: of a program, or a name that PATH has; `key`: who said so. Both empty: our own."""

    key: str = ""
    path: str = ""

    @property
    def program(self) -> str:
        """The absolute path. A virtual environment's is a link, which says where its packages are, so it is
        not followed. Raises LaminarError."""
        if not self.path:
            return sys.executable
        if (found := shutil.which(os.path.expanduser(self.path))) is None:
            inside = Path(self.path).expanduser() / "bin" / "python"
            instead = inside if inside.exists() else "the interpreter's path, as DIR/bin/python"
            raise LaminarError(f"{self.key}={self.path} is no program on this machine; name {instead}")
        return os.path.abspath(found)

    def check(self) -> None:
        """Blocks. Raises LaminarError where it cannot run our worker."""
        if not self.path:
            return
        program = self.program
        words = [program, "-c", _PROBE, *NEEDED]
        try:
            said = subprocess.run(
                words,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=_PROBE_SECONDS,
                env=self.environment(dict(os.environ)),
            ).stdout.split()
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaminarError(f"{self.key}={self.path} does not run: {error}") from None
        version = _numbers(said[0]) if said else ()
        if version < OLDEST:
            what = f"is Python {said[0]}" if version else "does not answer as a Python does"
            raise LaminarError(f"{self.key}={self.path} {what}; name one of 3.11 or newer")
        there = dict(word.split("=", 1) for word in said[1:])
        if lacking := [n for n, oldest in NEEDED.items() if _numbers(there.get(n, "")) < oldest]:
            wanted = " ".join(f"'{name}>={'.'.join(map(str, NEEDED[name]))}'" for name in lacking)
            raise LaminarError(
                f"{self.key}={self.path} lacks {' and '.join(lacking)}, which our worker needs there: run "
                f"{program} -m pip install {wanted}"
            )

    def command(self) -> list[str]:
        """What starts our worker; its words follow."""
        if not self.path:
            return [self.program, "-m", "laminar_hpc.environments.workers.process"]
        return [self.program, "-P", str(Path(__file__).with_name("elsewhere.py"))]

    def environment(self, ours: dict[str, str]) -> dict[str, str]:
        """Returns the environment of its processes, from what ours would have."""
        return {n: v for n, v in ours.items() if n not in _ITS_OWN} if self.path else ours


OURS = Interpreter()


def _numbers(version: str) -> tuple[int, ...]:
    """(3, 11) of 3.11.4rc1; () of no version."""
    first = version.split(".")[:2]
    return tuple(map(int, first)) if all(part.isdigit() for part in first) else ()
