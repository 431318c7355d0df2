"""Rollouts on machines that come and go, and in other places: what is lost, and what it costs.

    python bench/anywhere.py --json anywhere.json
    python bench/anywhere.py tokens_again

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

import tempfile
from collections.abc import Callable
from pathlib import Path

from common import finish, options_of
from spot_fleet import spot_run

Row = dict[str, object]


def tokens_again(folder: Path) -> tuple[float, list[Row]]:
    """See the top of this file: the figure of the run that parks, and both runs."""
    rows = [spot_run(folder / "parked", None), spot_run(folder / "not-parked", 0.0)]
    return float(str(rows[0]["tokens_again"])), rows


FIGURES: dict[str, Callable[[Path], tuple[float, list[Row]]]] = {"tokens_again": tokens_again}


def main() -> None:
    options = options_of(__doc__ or "")
    options.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)}; default all")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="laminar-anywhere-") as folder:
        found = {name: FIGURES[name](Path(folder)) for name in given.figures or FIGURES}
    rows = [{"figure": name, **row} for name, (_, of) in found.items() for row in of]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    finish(given, {name: figure for name, (figure, _) in found.items()}, rows, columns)


if __name__ == "__main__":
    main()
