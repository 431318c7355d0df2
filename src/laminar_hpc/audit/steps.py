"""Steps, checkpoints and batches: what was trained is what the history of steps says, each trajectory once.

A trajectory that was trained twice is missing from the first of both steps, since the store knows one step
of each: so every step must have its groups, and as many trajectories and tokens as the trainer was given.
"""

from collections import defaultdict
from collections.abc import Iterator

from laminar_hpc.audit.records import Records, StoreRecords


def steps_follow(records: Records) -> Iterator[str | None]:
    """Each launch goes on from a step that was reached, one step after the other; checkpoints are of steps
    that were reached."""
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
    return None


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
