"""The figure of bench/anywhere.py on rollouts whose machines are taken back.

`tokens_again`: four emulated replicas in processes of their own. Within one minute each machine is taken
back: one every 10 s gets its notice, a file that says 10 s, after which its process is killed if it is still
there. Another replica comes in its place after 15 s, so that in the end there is none. KV caches are as large
as what they hold, so that others have room for a part. Once with a relay that parks KV caches, and stands for
a machine that stays, and once without.

Figures: `tokens_again`, tokens that engines drew beyond those of all responses, by the engines' own count
(goal: 0 where KV was parked). In its rows `prefilled_again`, response tokens whose KV was computed a second
time; `parked_bytes`, those that crossed the socket, a thousandth of the real ones; `leave_seconds`, from the
notice to the end of the process; `killed`, processes that outstayed the grace; `audit`, what `laminar audit`
objects to.
"""

import argparse
import tempfile
from pathlib import Path

from spot_fleet import spot_run

Row = dict[str, object]


def tokens_again(_: argparse.Namespace) -> tuple[dict[str, float], list[Row]]:
    """See the top of this file: the figure of the run that parks, and both runs."""
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        rows = [spot_run(Path(folder) / "parked", None), spot_run(Path(folder) / "not-parked", 0.0)]
    return {"tokens_again": float(str(rows[0]["tokens_again"]))}, rows
