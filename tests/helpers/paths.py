"""Where things lie, so that a test may stand in any folder."""

import os
from pathlib import Path

HELPERS = Path(__file__).resolve().parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
BENCH = ROOT / "bench"
EXAMPLES = ROOT / "examples"


def environment(**more: str) -> dict[str, str]:
    """This process's, in which a program of the helpers finds the others."""
    return {**os.environ, "PYTHONPATH": str(TESTS), **more}
