"""What the journal of the store costs, and how long a controller on another machine takes to have the store.

A turn of the controller, as far as its store goes: the trajectories of two groups are granted, finished and
consumed in one transaction, with 1K and with 16K response tokens each, without and with the journal, by turns
in one process. Then stores are rebuilt from the journal alone: one of 100,000 small trajectories, and one of
16,000 of 1K tokens. Store and journal lie on the disk of --folder (default: the folder for temporary files);
what a shared file system adds to a turn, a round trip, is not in the figures.

    python bench/journal.py [--json PATH] [--folder DIR]

Goal: `rebuild_seconds_100000` at most 15.
"""

import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import common

from laminar_hpc.line.messages.data import ResponsePlace, ScorePart, Trajectory
from laminar_hpc.store.journal import Journal
from laminar_hpc.store.rebuild import build
from laminar_hpc.store.recovery import settle
from laminar_hpc.store.store import Store

GROUPS, SAMPLES = 2, 8  # of a turn
COLUMNS = (
    "part",
    "response_tokens",
    "trajectories",
    "trajectories_per_second_without",
    "trajectories_per_second",
    "ratio",
    "turn_milliseconds_added",
    "journal_bytes_per_trajectory",
    "transactions",
    "megabytes",
    "rebuild_seconds",
    "megabytes_per_second",
)


def response(tokens: int, seed: int) -> Trajectory:
    """Of so many tokens, as a replica reports it."""
    place = ResponsePlace("rollout0_00000000.0000", seed, 8 * tokens + 68)
    digest = random.Random(seed).randbytes(16).hex()
    return Trajectory(0, 0, 0, 0, 0, 0, tokens, tokens, 1, "stop", 1.0, 2.0, digest=digest, place=place)


def turn(store: Store, number: int, trajectory: Trajectory) -> None:
    """One transaction of GROUPS groups, from grant to consumption."""
    groups = range(number * GROUPS, (number + 1) * GROUPS)
    for group in groups:
        store.rows.add_group(group, group, 0, 0, group + 1, 1.0)
        store.rows.add_prompt(group, range(100))
        ids = range(group * SAMPLES, (group + 1) * SAMPLES)
        store.rows.add_trajectories(ids, group, 0, 0, 0, 0)
        for trajectory_id in ids:
            trajectory.trajectory_id, trajectory.group_id = trajectory_id, group
            store.rows.store_response(trajectory)
            store.rows.finish_trajectory(trajectory.trajectory_id, ScorePart(3.0, 1.0), 1.0)
        store.rows.finish_group(group, 0, group, 2.0)
    store.rows.consume(groups, number)
    store.commit()


def opened(folder: Path, with_journal: bool) -> Store:
    path, journal = folder / "local" / "store.sqlite", folder / "run" / "journal"
    (folder / "run").mkdir(parents=True, exist_ok=True)
    if not with_journal:
        return Store(path.parent)
    settle(journal, path, print)
    return Store(path.parent, journal=Journal(journal, path, print))


def throughput(root: Path, tokens: int, turns: int) -> dict[str, float]:
    """Both kinds turn by turn, so that they share the machine's moods."""
    stores = {kind: opened(root / f"{tokens} {kind}", kind == "with") for kind in ("without", "with")}
    seconds: dict[str, list[float]] = {kind: [] for kind in stores}
    trajectory = response(tokens, tokens)
    for number in range(turns):
        for kind, store in stores.items():
            begun = time.perf_counter()
            turn(store, number, trajectory)
            seconds[kind].append(time.perf_counter() - begun)
    for store in stores.values():
        store.close()
    journal = root / f"{tokens} with" / "run" / "journal"
    written = sum(file.stat().st_size for file in journal.glob("segment_*"))
    count = turns * GROUPS * SAMPLES
    figures = {kind: GROUPS * SAMPLES / statistics.median(times) for kind, times in seconds.items()}
    ratio, bytes_each = figures["with"] / figures["without"], written / count
    cost = statistics.median(seconds["with"]) - statistics.median(seconds["without"])
    return {
        "response_tokens": tokens,
        "trajectories_per_second_without": figures["without"],
        "trajectories_per_second": figures["with"],
        "ratio": ratio,
        "turn_milliseconds_added": cost * 1e3,
        "journal_bytes_per_trajectory": bytes_each,
    }


def rebuild(root: Path, trajectories: int, tokens: int) -> dict[str, float]:
    """A store of so many, from the journal alone."""
    folder = root / f"rebuild {tokens}"
    store, trajectory = opened(folder, True), response(tokens, tokens)
    for number in range(trajectories // (GROUPS * SAMPLES)):
        turn(store, number, trajectory)
    store.close()
    begun = time.perf_counter()
    _, transactions, size = build(folder / "run" / "journal", folder / "rebuilt.sqlite")
    seconds = time.perf_counter() - begun
    return {
        "trajectories": trajectories,
        "response_tokens": tokens,
        "transactions": transactions,
        "megabytes": size / 1e6,
        "rebuild_seconds": seconds,
        "megabytes_per_second": size / 1e6 / seconds,
    }


def main() -> None:
    options = common.options_of(__doc__ or "")
    options.add_argument("--folder", type=Path, help="where store and journal are made")
    chosen = options.parse_args()
    root = Path(tempfile.mkdtemp(prefix="laminar-journal-", dir=chosen.folder))
    try:
        turns = [throughput(root, 1_000, 300), throughput(root, 16_000, 60)]
        rebuilds = [rebuild(root, 100_000, 10), rebuild(root, 16_000, 1_000)]
    finally:
        shutil.rmtree(root)
    figures = {f"ratio_{row['response_tokens']}": row["ratio"] for row in turns}
    figures |= {f"rebuild_seconds_{row['trajectories']}": row["rebuild_seconds"] for row in rebuilds}
    rows = [{"part": "turns"} | row for row in turns] + [{"part": "rebuild"} | row for row in rebuilds]
    common.finish(chosen, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
