"""Rollouts on machines that come and go, and at other places: what they cost, and what is lost.

python bench/anywhere.py --json anywhere.json                      all figures
python bench/anywhere.py --only bytes_over_full --steps 5          one of them
"""

import argparse
import sys
from collections.abc import Callable

import anywhere_places
import anywhere_rate
import anywhere_scaling
import anywhere_spot
import common

Measure = Callable[[argparse.Namespace], tuple[dict, list[dict]]]
MEASURES: tuple[Measure, ...] = (
    anywhere_places.bytes_over_full,
    anywhere_places.megabytes_per_second,
    anywhere_places.wide_area_seconds,
    anywhere_rate.rate_over_local,
    anywhere_spot.tokens_again,
    anywhere_scaling.autoscaled_over_best,
)
FIGURES = {measure.__name__: measure for measure in MEASURES}


def main() -> None:
    parts = (anywhere_places, anywhere_rate, anywhere_spot, anywhere_scaling)
    options = common.options_of("\n".join([__doc__ or "", *(part.__doc__ or "" for part in parts)]))
    options.add_argument("--only", choices=FIGURES, help="one figure (default: all)")
    options.add_argument("--steps", type=int, default=8, help="publications behind the first (default 8)")
    options.add_argument("--layers", type=int, help="of the 0.5B shape (default: its 24)")
    options.add_argument("--repeats", type=int, default=3, help="pairs of runs (default 3)")
    options.add_argument("--run-steps", type=int, default=16, help="of each run (default 16)")
    options.add_argument("--control", default="cubic", help="of TCP, for rate_over_local (default cubic)")
    options.add_argument("--megabytes", type=int, default=512, help="of megabytes_per_second (default 512)")
    options.add_argument("overrides", nargs="*", metavar="key=value", help="settings for rate_over_local")
    chosen = options.parse_args()
    figures, rows = {}, []
    for name, measure in FIGURES.items():
        if chosen.only in (None, name):
            print(f"  {name}", file=sys.stderr, flush=True)
            found, more = measure(chosen)
            figures |= found
            rows += [{"figure": name, **row} for row in more]
    common.finish(chosen, figures, rows, list(dict.fromkeys(name for row in rows for name in row)))


if __name__ == "__main__":
    main()
