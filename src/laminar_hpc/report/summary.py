"""run_dir/summary.json: the figures of a run, made from its files alone. docs/metrics.md defines every one of
them.

Called at the end of a run, by `laminar report`, and by the benches. A figure that the files do not hold is
null, never a guess. What was learned and trained counts over the history that led to the weights; durations
count over everything that happened.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from laminar_hpc.machine.files.whole import write_whole
from laminar_hpc.policies.metrics import REWARD_PREFIX
from laminar_hpc.report import rundata, turns
from laminar_hpc.report.idle import idle_fraction
from laminar_hpc.report.rundata import Run, Totals

GOAL = 0.70  # mean accuracy of the trained batches ...
GOAL_STEPS = 3  # ... over so many steps in a row


def build(run_dir: Path) -> dict:
    """The figures of the run in `run_dir`. Raises LaminarError when it is no run."""
    return figures(rundata.load(run_dir))


def write(run: Run) -> dict:
    """Writes summary.json of a loaded run in one piece; returns its content."""
    summary = figures(run)
    write_whole(run.directory / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def figures(run: Run) -> dict:
    """The figures of a loaded run; keys as in docs/metrics.md."""
    steps = run.steps
    mismatches = run.records.get("logprob_mismatch", [])
    saved, generated = _total(steps, "tokens_saved"), _total(steps, "tokens_generated")
    pipelines = [launch.pipeline for launch in run.launches if launch.pipeline]
    return {
        "accuracy_before": accuracy(run, "greedy", "before"),
        "accuracy_after": accuracy(run, "greedy", "after"),
        "accuracy_after_sampled": accuracy(run, "sampled", "after"),
        "evaluations": evaluations(run),
        "steps": max((step["step"] for step in steps), default=0),
        "trajectories_trained": _per_step(run, "trajectories", lambda of: of.trajectories),
        "trajectories_to_070": trajectories_to_goal(steps),
        "response_tokens_trained": _per_step(run, "response_tokens", lambda of: of.response_tokens),
        "restarts": len(run.records.get("restart", [])),
        "wall_seconds": sum(launch.end - launch.start for launch in run.launches),
        "tokens_per_second": tokens_per_second(run),
        "max_versions_per_trajectory": versions_max(run),
        "staleness_generation_mean": turns.weighted_mean(steps, "staleness_generation_mean"),
        "staleness_generation_max": _whole_max(steps, "staleness_generation_max"),
        "staleness_training_mean": turns.weighted_mean(steps, "staleness_training_mean"),
        "staleness_training_max": _whole_max(steps, "staleness_training_max"),
        "trainer_idle_fraction": idle_fraction(run, "trainer"),
        "rollout_idle_fraction": idle_fraction(run, "rollout"),
        "publish_stall_seconds_mean": _mean(run.records.get("publish", []), "stall_seconds"),
        "publish_bytes_over_full_mean": _mean(run.records.get("publish", []), "bytes_over_full"),
        "publish_changed_fraction_mean": _mean(run.records.get("publish", []), "changed_fraction"),
        "pull_seconds_mean": _mean(run.records.get("pull", []), "seconds"),
        "logprob_mismatch_mean": _mean(mismatches, "mean"),
        "logprob_mismatch_max": _max(mismatches, "max"),
        "guard_left_out": _total(steps, "guard_left_out"),
        "guard_skipped_updates": _total(steps, "guard_skipped_updates"),
        "reward_errors": _per_step(run, "reward_error_count", lambda of: of.reward_errors),
        "reward_error_first": reward_error_first(run),
        "rewards": rewards(steps),
        "environment": turns.figures(run),
        **moves(run),
        **taken_back(run),
        "groups_filtered": _total(steps, "groups_filtered"),
        "tokens_discarded": _total(steps, "tokens_discarded"),
        "reports_refused": _total(steps, "reports_refused"),
        "tokens_saved": saved,
        "tokens_saved_fraction": saved / (saved + generated) if saved is not None and generated else None,
        "pipeline": pipelines[-1] if pipelines else (run.config.get("pipeline") or {}).get("name"),
    }


def versions_max(run: Run) -> int | None:
    """Weight ids of a trained trajectory; of those not in the store, or in a replay, by the steps' lines."""
    stored, told = run.versions_max(), _whole_max(run.steps, "versions_per_trajectory_max")
    if stored is None or (run.has_old_steps and told is not None):
        return told if stored is None else max(stored, told or 0)
    return stored


def reward_error_first(run: Run) -> str | None:
    """Of trained trajectories, by the time of their scores; where the store has no more the first ones, of
    all that were scored."""
    if run.has_old_steps and any(of.reward_errors for of in run.totals):
        return next((str(record["text"]) for record in run.records.get("reward_error", [])), None)
    failed = (t for t in run.consumed if t.reward_error)
    first = min(failed, key=lambda t: t.time_scored, default=None)
    return first.reward_error if first else None


def rewards(steps: list[dict]) -> dict[str, dict[str, float]]:
    """Of each reward function in reward.functions: its mean in the first and in the last step's batch."""
    means: dict[str, dict[str, float]] = {}
    for step in steps:
        for key, mean in step.items():
            if key.startswith(REWARD_PREFIX):
                means.setdefault(key.removeprefix(REWARD_PREFIX), {"first": mean})["last"] = mean
    return means


def moves(run: Run) -> dict:
    """Of trajectories that changed their replica; 0 and null where none did."""
    moves = run.records.get("move", [])
    return {
        "trajectories_moved": len(moves),
        "trajectories_rescued": sum(move["source"] is None for move in moves),
        "trajectories_rescued_by_load": sum(move.get("loaded", False) for move in moves),
        "tokens_moved": sum(move["tokens"] for move in moves),
        "prefill_tokens_saved": sum(move["prefix_tokens"] for move in moves),
        "move_seconds_mean": _mean(moves, "seconds"),
        "move_seconds_max": _max(moves, "seconds"),
    }


def taken_back(run: Run) -> dict:
    """Of replicas that were told to end, and of KV caches that relays kept for them; 0 where none were."""
    parked = [record for record in run.records.get("parked", []) if record["tokens"]]
    taken = run.records.get("taken_up", [])
    return {
        "replicas_told_to_end": len(run.records.get("leaving", [])),
        "trajectories_parked": len(parked),
        "tokens_parked": sum(record["tokens"] for record in parked),
        "bytes_parked": sum(record["bytes"] for record in parked),
        "parked_tokens_taken_up": sum(record["tokens"] for record in taken),
        "parked_trajectories_prefilled": sum(not record["tokens"] for record in taken),
    }


def files(run: Run) -> list[str]:
    """The evaluated files in the order of the configuration."""
    return list(dict.fromkeys(e.get("file", "") for e in run.evaluations))


def accuracy(run: Run, name: str, label: str, file: str | None = None) -> float | None:
    """Of the newest evaluation so named and labelled; of the first file unless another one is named."""
    file = next(iter(files(run)), "") if file is None else file
    wanted = (name, label, file)
    found = (e for e in reversed(run.evaluations) if (e["name"], e["label"], e.get("file", "")) == wanted)
    return next((e["accuracy"] for e in found), None)


def evaluations(run: Run) -> dict[str, dict[str, float | None]]:
    """Per file: accuracy before and after, greedy and sampled."""
    kinds = {
        "before": ("greedy", "before"),
        "after": ("greedy", "after"),
        "before_sampled": ("sampled", "before"),
        "after_sampled": ("sampled", "after"),
    }
    return {
        file: {key: accuracy(run, name, label, file) for key, (name, label) in kinds.items()}
        for file in files(run)
    }


def trajectories_to_goal(steps: list[dict], goal: float = GOAL) -> int | None:
    """Trajectories trained when the mean accuracy of the trained batches over GOAL_STEPS steps first reached
    `goal`; None if never."""
    trained = 0.0  # metrics of the trainer cross as floats
    for index, step in enumerate(steps):
        trained += step["trajectories"]
        recent = [s["accuracy_mean"] for s in steps[max(0, index + 1 - GOAL_STEPS) : index + 1]]
        if len(recent) == GOAL_STEPS and statistics.fmean(recent) >= goal - 1e-9:
            return int(trained)
    return None


def tokens_per_second(run: Run) -> float | None:
    """Prompt and response tokens of a global batch over the time between actor updates (the paper's metric,
    section 6).

    Each interval between two updates of one launch counts with the batch that ends it; None before the second
    update.
    """
    tokens, seconds = 0, 0.0
    for launch in run.launches:
        for step in launch.steps[1:]:
            tokens += step["prompt_tokens"] + step["response_tokens"]
        if launch.steps:
            seconds += launch.steps[-1]["time"] - launch.steps[0]["time"]
    return tokens / seconds if seconds > 0 else None


def _per_step(run: Run, field: str, stored: Callable[[Totals], int]) -> int | None:
    """Total over the history: of each step what the store holds, else (a replay has no store of its own) what
    its metrics say.

    A step may be in the store alone: the trainer checkpointed it while the controller was dying.
    """
    in_store = {of.consumed_step: stored(of) for of in run.totals}
    values = {step["step"] - 1: step.get(field) for step in run.steps} | in_store
    known = [int(value) for value in values.values() if value is not None]
    return sum(known) if len(known) == len(values) else None


def _values(records: Iterable[dict], field: str) -> list[float]:
    return [record[field] for record in records if record.get(field) is not None]


def _mean(records: Iterable[dict], field: str) -> float | None:
    values = _values(records, field)
    return statistics.fmean(values) if values else None


def _max(records: Iterable[dict], field: str) -> float | None:
    return max(_values(records, field), default=None)


def _total(steps: list[dict], field: str) -> int | None:
    """Sum over the history of what each step's line counts; None where no line has it."""
    values = _values(steps, field)
    return round(sum(values)) if values else None


def _whole_max(records: Iterable[dict], field: str) -> int | None:
    """As `_max`, of counts, which cross between processes as floats."""
    value = _max(records, field)
    return None if value is None else int(value)
