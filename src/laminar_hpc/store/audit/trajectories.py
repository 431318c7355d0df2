"""Trajectories and groups: all are on record, each in one state, and what is said of them agrees."""

from collections import defaultdict
from collections.abc import Iterator

from laminar_hpc.policies.filtering import UNGRADED
from laminar_hpc.policies.metrics import accuracy
from laminar_hpc.store.audit.records import GroupRow, Records, StoreRecords, TrajectoryRow

# state of a trajectory -> (it has a response, it has a score, the states that its group may have)
_STATES = {
    "granted": (False, False, {"granted"}),
    "generated": (True, False, {"granted"}),
    "finished": (True, True, {"granted", "finished"}),
    "consumed": (True, True, {"consumed"}),
    "given_up": (True, True, {"given_up"}),
}

MISSING_AT_ONCE = 1000  # ids in a row, of which each has a line of its own


def all_on_record(_: Records, store: StoreRecords) -> Iterator[str | None]:
    """Ids are given in a row, and none is missing: also not from the sums over old steps."""
    if store.old_steps:
        yield _sums_wrong(store)
    for kind, ids in (
        ("trajectory", [] if store.old_steps else [t.id for t in store.trajectories]),
        ("group", list(store.groups)),
        ("weight id", [w.id for w in store.weights]),
    ):
        expected = 0
        for i in sorted(ids):
            if i - expected > MISSING_AT_ONCE:
                yield f"{kind} {expected} to {i - 1}: not in the store"
            else:
                yield from (f"{kind} {lost}: not in the store" for lost in range(expected, i))
            yield None
            expected = max(expected, i + 1)
    drawn = int(store.meta.get("prompts_drawn", 0))
    wrong = drawn != len(store.groups)
    yield f"{drawn} prompts were drawn, {len(store.groups)} groups are there" if wrong else None


def _sums_wrong(store: StoreRecords) -> str | None:
    """Compares number and sum of all ids with those of a row from 0 to the next id."""
    old, ids = store.old_steps.values(), {t.id for t in store.trajectories}
    count = len(ids) + sum(step.trajectories for step in old)
    total = sum(ids) + sum(step.id_sum for step in old)
    wanted = max(int(store.meta.get("next_trajectory", 0)), max(ids, default=-1) + 1)
    if (count, total) == (wanted, wanted * (wanted - 1) // 2):
        return None
    return f"{wanted} trajectories were granted; rows and sums hold {count}, or not these"


def one_state_each(_: Records, store: StoreRecords) -> Iterator[str | None]:
    """Trained, waiting, without a score, in progress or given up; response, score and step say the same."""
    archived = int(store.meta.get("archived_steps", 0))
    ungraded = {g.id for g in store.groups.values() if (g.reason or "").startswith(UNGRADED)}
    for t in store.trajectories:
        yield _state_wrong(t, archived, t.group_id in ungraded)


def _state_wrong(t: TrajectoryRow, archived: int, ungraded: bool) -> str | None:
    """Of the first `archived` steps the archive has the responses; of groups that are given up nobody.
    `ungraded`: its group was given up before all had a score."""
    if t.state not in _STATES:
        return f"trajectory {t.id}: '{t.state}' is no state"
    response, score, _ = _STATES[t.state]
    if t.state == "given_up" and ungraded:
        response, score = bool(t.stored), bool(t.scored)
    response = response and not (t.consumed_step is not None and t.consumed_step < archived)
    let_go = t.state == "given_up" and archived > 0
    if bool(t.stored) != response and not let_go:
        return f"trajectory {t.id}: {t.state}, {'without a' if response else 'with a'} response"
    if bool(t.scored) != score:
        return f"trajectory {t.id}: {t.state}, {'without a' if score else 'with a'} score"
    if (t.consumed_step is not None) != (t.state == "consumed"):
        return f"trajectory {t.id}: {t.state}, and the step that trained it is {t.consumed_step}"
    return None


def scores_agree(_: Records, store: StoreRecords) -> Iterator[str | None]:
    """The score as a whole, and what columns of their own say of it."""
    for t in store.trajectories:
        score = t.parts()
        if score is None:
            yield f"trajectory {t.id}: its score cannot be read" if t.scored else None
            continue
        right = accuracy(score.reward, score.reward_parts)
        whole = (score.reward, right, score.reward_error, score.time_scored)
        names = ("reward", "accuracy", "reward_error", "time_scored")
        wrong = [name for name, of in zip(names, whole, strict=True) if getattr(t, name) != of]
        yield f"trajectory {t.id}: its {wrong[0]} is not that of its score" if wrong else None


def groups_agree(records: Records, store: StoreRecords) -> Iterator[str | None]:
    """Groups agree with their trajectories in state, step and number."""
    members: dict[int, list[TrajectoryRow]] = defaultdict(list)
    for t in store.trajectories:
        members[t.group_id].append(t)
    for group_id in members.keys() - store.groups.keys():
        yield f"trajectory {members[group_id][0].id}: its group {group_id} is not in the store"
    algorithm = records.config.get("algorithm") or {}
    most = algorithm.get("samples_per_prompt")
    product = (most or 0) * algorithm.get("prompts_per_step", 0)
    same = all(launch.trajectories_per_step in (None, product) for launch in records.launches)
    least = algorithm.get("first_samples") or most
    sizes = (int(least), int(most)) if most and least and same and not records.is_replay else None
    for group in store.groups.values():
        known = members[group.id]
        if known or not _is_old(group, store):
            yield _group_wrong(group, known, sizes)


def _is_old(group: GroupRow, store: StoreRecords) -> bool:
    """Whether its trajectories may be in the sums."""
    if group.state == "given_up":
        return group.id < int(store.meta.get("given_up_rows_from", 0))
    return group.state == "consumed" and group.consumed_step in store.old_steps


def _group_wrong(group: GroupRow, members: list[TrajectoryRow], sizes: tuple[int, int] | None) -> str | None:
    if group.state not in ("granted", "finished", "consumed", "given_up"):
        return f"group {group.id}: '{group.state}' is no state"
    for t in members:
        if t.state in _STATES and group.state not in _STATES[t.state][2]:
            return f"trajectory {t.id}: {t.state}, its group {group.id} is {group.state}"
        if t.consumed_step != group.consumed_step:
            return f"trajectory {t.id}: trained at step {t.consumed_step}, its group at {group.consumed_step}"
    if (group.consumed_step is not None) != (group.state == "consumed"):
        return f"group {group.id}: {group.state}, and the step that trained it is {group.consumed_step}"
    if group.state == "granted" and all(t.state == "finished" for t in members):
        return f"group {group.id}: granted, but all of its trajectories are finished"
    if sorted(t.sample_index for t in members) != list(range(len(members))):
        return f"group {group.id}: its samples are numbered {sorted(t.sample_index for t in members)}"
    if sizes and not sizes[0] <= len(members) <= sizes[1]:
        wanted = f"{sizes[0]}" if sizes[0] == sizes[1] else f"{sizes[0]} to {sizes[1]}"
        return f"group {group.id}: {len(members)} trajectories instead of {wanted}"
    return None


def given_up_for_a_reason(_: Records, store: StoreRecords) -> Iterator[str | None]:
    """A group is not given up without one."""
    for group in store.groups.values():
        if group.state == "given_up":
            yield None if group.reason else f"group {group.id}: given up without a reason"


def finished_in_one_order(_: Records, store: StoreRecords) -> Iterator[str | None]:
    """No two groups are finished as the same one, and the last is the number that are."""
    seen: dict[int, int] = {}
    for group in store.groups.values():
        if group.state in ("finished", "consumed"):
            order = group.finish_order
            other = seen.setdefault(order, group.id) if order else group.id
            if not order:
                yield f"group {group.id}: {group.state} without a place in the order of finishing"
            elif other != group.id:
                yield f"groups {other} and {group.id}: both finished as number {order}"
            else:
                yield None
    count = int(store.meta.get("groups_finished", 0))
    wrong = count < max(seen, default=0)  # the last one may have lost a response since
    yield f"{count} groups were finished, the last as number {max(seen, default=0)}" if wrong else None
