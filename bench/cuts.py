"""The network between any two roles is cut and mended, again and again; then `laminar audit`.

    python bench/cuts.py --times 20 --seconds 5,8,15 --json cuts.json          needs root and iproute2

A run with roles apart, each role in a network namespace of its own (bench/network.py). Every pair of
roles that speak to each other is parted `--times` times for each of the lengths, in shuffled order and with
`--between` seconds after each; the pairs do not wait for each other, so that a role may be cut off from
several others at once. Packets vanish, nobody is told. Relay and rollout share memory, not a network.

Figures: `cuts`; `messages_lost`: said and never taken, over all streams up (from workers) and down, as
bench/counted/sitecustomize.py counts them in every process; `restarts` of roles, and `joins` of a member
beyond its first (it was taken for dead); `audit_culprits` and `responses_lost`: goals 0. `steps` trained, and
`step_seconds_longest`: the longest time without one.
"""

import argparse
import os
import random
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import common
from network import Network, missing
from roles import ROLES, Roles, audited, customize_roles, steps_done

from laminar_hpc.machine.files import jsonl

PAIRS = (("controller", "trainer"), ("controller", "relay"), ("controller", "rollout"), ("trainer", "relay"))
COLUMNS = ("pair", "seconds", "cuts")


@dataclass
class Schedule:
    """The cuts of one pair: `left` in order, of which the first is under way while `mend_at` is set."""

    pair: tuple[str, str]
    left: list[float]
    begin_at: float
    mend_at: float | None = None
    done: list[float] = field(default_factory=list)

    def turn(self, net: Network, now: float, between: float) -> None:
        hosts = [ROLES.index(role) for role in self.pair]
        if self.mend_at is None and self.left and now >= self.begin_at:
            net.part(*hosts)
            self.mend_at = now + self.left[0]
        elif self.mend_at is not None and now >= self.mend_at:
            net.join(*hosts)
            self.mend_at, self.begin_at = None, now + between * random.uniform(0.5, 1.5)
            self.done.append(self.left.pop(0))


def schedules(options: argparse.Namespace) -> list[Schedule]:
    found = []
    for pair in PAIRS:
        lengths = options.seconds * options.times
        random.shuffle(lengths)
        found.append(Schedule(pair, lengths, time.monotonic() + random.uniform(0, options.between)))
    return found


def cut(options: argparse.Namespace, net: Network, roles: Roles) -> list[Schedule]:
    """Until all is done, or `--limit` seconds are over."""
    plan, until, said = schedules(options), time.monotonic() + options.limit, 0
    while any(schedule.left for schedule in plan):
        stop = time.monotonic() > until
        for schedule in plan:
            if stop:
                del schedule.left[1 if schedule.mend_at is not None else 0 :]
            schedule.turn(net, time.monotonic(), options.between)
        roles.tend_for(0.1)
        if (done := sum(len(schedule.done) for schedule in plan)) >= said + 20:
            said = done
            print(f"  {done} cuts, step {steps_done(roles.run_dir)}", file=sys.stderr, flush=True)
    return plan


def messages_lost(folder: Path) -> int:
    """At the end of a run: up and down, what was said and not taken."""
    said, taken = {"up": 0, "down": 0}, {"up": 0, "down": 0}
    for path in folder.glob("*.count"):
        here, there = ("down", "up") if path.name.startswith("controller.") else ("up", "down")
        out, back = struct.unpack("<qq", path.read_bytes())
        said[here] += out
        taken[there] += back
    print(f"  said {said}, taken {taken}", file=sys.stderr, flush=True)
    return sum(said[way] - taken[way] for way in said)


def longest_step(run_dir: Path, start: float) -> float:
    times = [start, *(r["time"] for r in jsonl.read(run_dir / "metrics.jsonl", "step") if r["time"] > start)]
    return max((b - a for a, b in pairwise(times)), default=0.0)


@contextmanager
def running(options: argparse.Namespace, folder: Path, net: Network) -> Iterator[Roles]:
    (folder / "counts").mkdir(parents=True, exist_ok=True)
    os.environ["COUNTED"] = str(folder / "counts")
    customize_roles("counted")
    words = [f"experiment={options.experiment}", f"steps={10**6}", "restarts=0", "evaluation.files=[]"]
    words += [f"cluster.host={net.address(ROLES.index('controller'))}", *options.overrides]
    inside = {role: ["ip", "netns", "exec", net.namespace(host)] for host, role in enumerate(ROLES)}
    roles = Roles(folder / "run", words, folder / "run.log", inside)
    try:
        yield roles
    finally:
        late = roles.end()
        print(f"  {late} roles did not end by themselves", file=sys.stderr, flush=True)


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--times", type=int, default=20, help="cuts of each pair and length (default 20)")
    parser.add_argument(
        "--seconds",
        type=lambda text: [float(word) for word in text.split(",")],
        default=[5.0, 8.0, 15.0],
        help="lengths of a cut (default 5,8,15)",
    )
    parser.add_argument("--between", type=float, default=8.0, help="seconds from cut to cut (default 8)")
    parser.add_argument("--limit", type=float, default=2400.0, help="seconds, at most (default 2400)")
    options = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    with common.run_folder(options) as folder, Network(len(ROLES), None) as net:
        run_dir = folder / "run"
        with running(options, folder, net) as roles:
            roles.until_it_trains()
            start = time.time()
            plan = cut(options, net, roles)
            before = steps_done(run_dir)
            roles.tend_for(options.between)
        culprits, lost = audited(run_dir)
        joins = (run_dir / "logs" / "controller0.log").read_text().count(" joined (pid ")
        figures: dict[str, float | None] = {
            "cuts": sum(len(schedule.done) for schedule in plan),
            "messages_lost": messages_lost(folder / "counts"),
            "restarts": roles.starts - len(ROLES),
            "joins": joins - len(ROLES) + 1,  # the controller joins nobody
            "audit_culprits": len(culprits),
            "responses_lost": lost,
            "steps": before,
            "step_seconds_longest": longest_step(run_dir, start),
        }
    rows = [
        {"pair": "-".join(schedule.pair), "seconds": seconds, "cuts": schedule.done.count(seconds)}
        for schedule in plan
        for seconds in options.seconds
    ]
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
