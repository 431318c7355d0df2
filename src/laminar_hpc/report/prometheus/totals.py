"""What a run's records add up to, over all its launches: counters and histograms for Prometheus.

Each is a row of COUNTERS or HISTOGRAMS, with the kind and the field of the records that it is made of
(docs/metrics.md). A step that is done again after a restore counts again, so that no counter goes back.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from laminar_hpc.policies.metrics import REWARD_PREFIX

# seconds: from a move on loopback to a checkpoint of hundreds of gigabytes
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


@dataclass(frozen=True)
class RecordSum:
    """A metric that is summed over the records of a kind: their `field`, or 1 each without one. `only`: those
    that count."""

    kind: str
    about: str
    field: str = ""
    only: Callable[[dict], bool] = lambda _: True


# Of the metrics' names, without laminar_ and _total.
COUNTERS = {
    "launches": RecordSum("start", "Launches of the run"),
    "restarts": RecordSum("restart", "Launches after a death"),
    "steps_done": RecordSum("step", "Trainer steps done"),
    "trajectories_trained": RecordSum("step", "Trajectories trained", "trajectories"),
    "prompt_tokens_trained": RecordSum("step", "Prompt tokens trained", "prompt_tokens"),
    "response_tokens_trained": RecordSum("step", "Response tokens trained", "response_tokens"),
    "trainer_wait_seconds": RecordSum("step", "Time that the trainer waited for batches", "wait_seconds"),
    "trainer_train_seconds": RecordSum("step", "Time that the trainer trained", "train_seconds"),
    "trainer_seconds": RecordSum("step", "Time between the ends of steps", "seconds"),
    "reward_errors": RecordSum("step", "Trained trajectories without a real reward", "reward_error_count"),
    "skipped_updates": RecordSum("step", "Updates skipped for non-finite gradients", "skipped_updates"),
    "guard_left_out": RecordSum("step", "Trajectories that the guard left out", "guard_left_out"),
    "guard_skipped_updates": RecordSum("step", "Updates that the guard skipped", "guard_skipped_updates"),
    "groups_filtered": RecordSum("step", "Groups given up for equal rewards", "groups_filtered"),
    "tokens_generated": RecordSum("step", "Response tokens of completed groups", "tokens_generated"),
    "samples_saved": RecordSum("step", "Samples saved by adaptive sampling", "samples_saved"),
    "tokens_saved": RecordSum("step", "Tokens saved by adaptive sampling, estimated", "tokens_saved"),
    "tokens_discarded": RecordSum("step", "Response tokens lost and drawn again", "tokens_discarded"),
    "reports_refused": RecordSum("step", "Reports from attempts that no longer counted", "reports_refused"),
    "groups_given_up": RecordSum("given_up", "Groups that are never trained"),
    "publications": RecordSum("publish", "Publications of weights"),
    "publish_bytes": RecordSum("publish", "Bytes that left the trainers for relays", "bytes"),
    "relay_bytes": RecordSum("relay", "Bytes that relays received", "bytes"),
    "checkpoints": RecordSum("checkpoint", "Checkpoints written"),
    "repacks": RecordSum("repack", "Repack plans carried out"),
    "trajectories_moved": RecordSum("move", "Trajectories that changed their replica"),
    "trajectories_rescued": RecordSum(
        "move", "Moved trajectories whose replica had died", only=lambda move: move.get("source") is None
    ),
    "tokens_moved": RecordSum("move", "Response tokens of moved trajectories", "tokens"),
    "prefill_tokens_saved": RecordSum("move", "Tokens whose KV cache came along", "prefix_tokens"),
    "moves_called_off": RecordSum("move_off", "Moves that were called off"),
    "trajectories_lost": RecordSum("lost", "Attempts of trajectories that were lost"),
    "engines_hung": RecordSum("engine_hung", "Engines that made no progress and were replaced"),
}
HISTOGRAMS = {
    "publish_seconds": RecordSum("publish", "Time of a transfer of weights to the relays", "seconds"),
    "publish_stall_seconds": RecordSum("publish", "Trainer's standstill for a publication", "stall_seconds"),
    "relay_seconds": RecordSum("relay", "Time from a publication's first byte to its last", "seconds"),
    "pull_seconds": RecordSum("pull", "Time of a replica's pull of weights", "seconds"),
    "move_seconds": RecordSum("move", "Time from the plan of a move to the change of the owner", "seconds"),
    "checkpoint_seconds": RecordSum("checkpoint", "Time of a checkpoint until it has its name", "seconds"),
    "checkpoint_stalled_seconds": RecordSum("checkpoint", "Trainer's standstill for it", "stalled"),
}


def _by_kind(rows: dict[str, RecordSum]) -> dict[str, list[tuple[str, RecordSum]]]:
    found = defaultdict(list)
    for name, row in rows.items():
        found[row.kind].append((name, row))
    return dict(found)


_COUNTERS_OF, _HISTOGRAMS_OF = _by_kind(COUNTERS), _by_kind(HISTOGRAMS)


@dataclass
class Histogram:
    """Counts below each of BUCKETS and above the last, and the sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    sum: float = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it) of each bucket, the last one's bound being +Inf."""
        total, found = 0, []
        for bound, count in zip([*map(str, BUCKETS), "+Inf"], self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class RunTotals:
    """The sums so far, and the newest values that a record of another kind than `step` has."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = defaultdict(float)
        self.histograms: dict[str, Histogram] = defaultdict(Histogram)
        self.mismatches: dict[str, dict] = {}  # rollout and number -> its newest record
        self.evaluations: dict[tuple[str, str], dict] = {}  # (file, greedy or sampled) -> the newest record

    def hear(self, record: dict) -> None:
        """Adds one record of metrics.jsonl."""
        kind = str(record.get("kind"))
        for name, row in _COUNTERS_OF.get(kind, ()):
            if row.only(record):
                self.counters[name] += (record.get(row.field) or 0) if row.field else 1
        for name, row in _HISTOGRAMS_OF.get(kind, ()):
            if isinstance(value := record.get(row.field), int | float):
                self.histograms[name].add(value)
        if kind == "logprob_mismatch":
            self.mismatches[str(record.get("replica"))] = record
        elif kind == "evaluation":
            self.evaluations[record.get("file", ""), record.get("name", "")] = record


def step_figures(record: dict) -> tuple[dict[str, float], dict[str, float]]:
    """(the numbers of a step's record by their names, the means of reward functions by theirs)."""
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
    rewards = {name: numbers.pop(name) for name in list(numbers) if name.startswith(REWARD_PREFIX)}
    for other in ("step", "time"):
        numbers.pop(other, None)
    return numbers, {name.removeprefix(REWARD_PREFIX): value for name, value in rewards.items()}
