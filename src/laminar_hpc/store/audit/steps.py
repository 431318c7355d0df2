"""Steps, checkpoints and batches: what was trained is what the history of steps says, each trajectory once.

A trajectory that was trained twice is missing from the first of both steps, since the store knows one step
of each: so every step must have its groups, and as many trajectories and tokens as the trainer was given.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import read_config
from laminar_hpc.line.messages.data import Trajectory
from laminar_hpc.policies.metrics import batch_metrics
from laminar_hpc.store import checkpoints
from laminar_hpc.store.audit.records import Records, StoreRecords
from laminar_hpc.store.signatures import key_path, objection, read_key
from laminar_hpc.store.store_layout import bounds_in

_FIGURES = (
    *("reward_mean", "accuracy_mean", "reward_error_count", "truncated_fraction"),
    *("response_length_mean", "response_length_max", "versions_per_trajectory_max"),
    *("staleness_generation_mean", "staleness_generation_max"),
    *("staleness_training_mean", "staleness_training_max"),
)


def steps_follow(records: Records) -> Iterator[str | None]:
    """Each launch goes on from a step that was reached, step by step; so are those of checkpoints."""
    reached = 0
    for number, launch in enumerate(records.launches, 1):
        if launch.restored > reached + 1:
            yield f"launch {number} went on from step {launch.restored}, but {reached} was reached"
        expected = launch.restored
        for record in launch.steps:
            expected += 1
            wrong = record["step"] != expected
            yield f"launch {number}: step {record['step']} follows on step {expected - 1}" if wrong else None
            expected = record["step"]
        reached = expected if launch.steps else max(reached, launch.restored)
    for step, state in records.checkpoints.items():
        yield _checkpoint_damage(records, step, state)


def _checkpoint_damage(records: Records, step: int, state: dict | None) -> str | None:
    if state is None:
        return f"checkpoint of step {step}: its state.json cannot be read"
    furthest = max((r["step"] for launch in records.launches for r in launch.steps), default=0)
    furthest = max(furthest, *(launch.restored for launch in records.launches), 0)
    if step > furthest + 1:
        return f"checkpoint of step {step}: no step after {furthest} is on record"
    store_id = records.store.meta.get("store_id") if records.store else None
    if store_id and state.get("store_id", store_id) not in ("", store_id):
        return f"checkpoint of step {step}: it belongs to store {state['store_id']}, the run has {store_id}"
    if step == max(records.checkpoints):  # all of it is read
        path = checkpoints.checkpoint_path(records.run_dir, step)
        with contextlib.suppress(FileNotFoundError), checkpoints.reading(path):
            wrong = ""
            if checkpoints.is_listed(path) or "files" in state:
                wrong = checkpoints.damage(path) or _signature_damage(records.run_dir, path)
            return f"checkpoint of step {step}: {wrong}" if wrong else None
    return None


def _signature_damage(run_dir: Path, checkpoint: Path) -> str:
    """Says what is wrong with the signature; without the key nothing can be said."""
    try:
        config = read_config(run_dir / "config.yaml")
        return objection(config, run_dir, checkpoint) if read_key(key_path(config, run_dir)) else ""
    except checkpoints.DamagedCheckpoint as error:
        return str(error)
    except LaminarError:
        return ""


def batches_are_whole(records: Records, store: StoreRecords) -> Iterator[str | None]:
    """Every step of the history has the groups that the configuration says, and no later step has any."""
    by_step: dict[int, int] = defaultdict(int)
    for group in store.groups.values():
        if group.consumed_step is not None:
            by_step[group.consumed_step] += 1
    kept, done = records.steps_kept(), records.steps_done()
    if records.is_replay:
        return
    algorithm = records.config.get("algorithm") or {}
    wanted = algorithm.get("prompts_per_step")
    product = (wanted or 0) * algorithm.get("samples_per_prompt", 0)
    same = all(launch.trajectories_per_step in (None, product) for launch in records.launches)
    for step in range(min(kept, done)):
        count = by_step[step]
        wrong = count != wanted if wanted and same else count == 0
        yield f"step {step}: {count} groups instead of {wanted if same else 'some'}" if wrong else None
    for step, count in by_step.items():
        if step > max(kept, done) and count:
            yield f"step {step}: {count} groups were trained beyond step {done}, the last on record"


def trained_once(records: Records, store: StoreRecords) -> Iterator[str | None]:
    """The trainer's own account of each step of the history is the store's."""
    counted: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for t in store.trajectories:
        if t.consumed_step is not None:
            counted[t.consumed_step][0] += 1
            counted[t.consumed_step][1] += t.response_length or 0
    for old in store.old_steps.values():
        counted[old.consumed_step][0] += old.trajectories
        counted[old.consumed_step][1] += old.tokens
    kept = records.steps_kept()
    for step, record in records.history().items():
        if records.is_replay or step > kept:
            continue
        names = ("trajectories", "response_tokens")
        said = {name: round(record[name]) for name in names if record.get(name) is not None}
        known = dict(zip(names, counted[step - 1], strict=True))
        wrong = [name for name in said if said[name] != known[name]]
        yield (
            f"step {step - 1}: the trainer was given {said[wrong[0]]} {wrong[0].replace('_', ' ')}, "
            f"the store has {known[wrong[0]]}"
            if wrong
            else None
        )


def figures_agree(records: Records, store: StoreRecords) -> Iterator[str | None]:
    """What a step's line in metrics.jsonl says of rewards, accuracy, lengths, staleness and policies is what
    its trajectories in the store give."""
    batches: dict[int, list[Trajectory]] = defaultdict(list)
    for t in store.trajectories:
        if t.consumed_step is not None and (record := t.record()) is not None:
            batches[t.consumed_step].append(record)
    for step, line in records.history().items():
        if records.is_replay or step > records.steps_kept() or step - 1 in store.old_steps:
            continue
        try:
            known = batch_metrics(batches[step - 1], 0, step - 1)
        except (TypeError, ZeroDivisionError):  # columns without a value, or none at all
            yield f"step {step - 1}: the store does not have what its figures are made of"
            continue
        said = {name: line[name] for name in _FIGURES if line.get(name) is not None}
        wrong = [n for n, of in said.items() if not math.isclose(of, known[n], rel_tol=1e-6, abs_tol=1e-9)]
        yield (
            f"step {step - 1}: {wrong[0]} {said[wrong[0]]:.6g} in metrics.jsonl, {known[wrong[0]]:.6g} by "
            "the store"
            if wrong
            else None
        )


def staleness_is_bounded(records: Records, store: StoreRecords) -> Iterator[str | None]:
    """By pipeline.max_staleness of the launch that trained it, or of an earlier one that granted it; where
    the bound adapts by that of its weights, which the store has."""
    bounds, bound, decided = dict[int, float](), 0.0, bounds_in(store.meta.items())
    for launch in records.launches:
        if "max_staleness" not in launch.derived:  # of a version that did not say
            return
        of_launch = launch.derived["max_staleness"]
        bound = max(bound, math.inf if of_launch is None else of_launch)
        bounds |= {record["step"] - 1: bound for record in launch.steps}
    for t in store.trajectories:
        if t.consumed_step is not None and not records.is_replay:
            staleness, most = t.consumed_step - t.weight_step, bounds.get(t.consumed_step, bound)
            most = min(most, decided.get(t.weight_step, most)) if most < math.inf else most
            wrong = staleness > most
            yield f"trajectory {t.id}: staleness {staleness}, at most {most:.0f}" if wrong else None
