"""The pages about keys and figures say what the code has."""

import subprocess
import sys

from helpers.paths import ROOT
from laminar_hpc.machine.observability.trace import KINDS
from laminar_hpc.report import summary

DOCS = ROOT / "docs"


def test_configuration_page_is_that_of_the_schema():
    """Promise: docs/configuration.md has every key with its type, default and meaning; it cannot drift from
    the schema."""
    done = subprocess.run(
        [sys.executable, str(DOCS / "make_configuration.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_every_figure_and_kind_is_explained(finished):
    """Promise: docs/metrics.md names every key of summary.json, every kind of span and every field of a
    step."""
    page = (DOCS / "metrics.md").read_text()
    names = [
        *summary.build(finished[0]),
        *KINDS,
        *(key for key in finished[1].steps[0] if key not in ("kind", "time")),
    ]
    missing = [
        name for name in names if f"`{name}`" not in page and not (name.endswith("_max") and "`_max`" in page)
    ]
    assert missing == []
