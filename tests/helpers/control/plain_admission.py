"""The rules of policies/admission.py as a pass over all groups, to compare with."""

from collections.abc import Iterable, Sequence

from laminar_hpc.policies.live_groups import GroupView


def plain_may_go_on(
    group: GroupView,
    weight_step: int,
    step: int,
    groups: Iterable[GroupView],
    groups_per_step: int,
    bound: int | None,
    taken: int,
) -> bool:
    """The invariant of policies/admission.py for all t that the older weights would change."""
    if bound is None or weight_step >= group.weight_step:
        return True
    others = [g.weight_step + bound for g in groups if g.group_id != group.group_id]
    return all(
        1 + sum(due <= t for due in others) <= groups_per_step * (t - step + 1) - taken
        for t in range(weight_step + bound, group.weight_step + bound)
    )


def plain_choice(
    step: int, groups: Sequence[GroupView], groups_per_step: int, bound: int | None, taken: int, size: int
) -> list[int]:
    """Sorted anew, and the invariant looked at group by group."""
    finished = [g for g in groups if g.finished]
    if len(finished) < size:
        return []
    if bound is None:
        return [g.group_id for g in sorted(finished, key=lambda g: g.finish_order)[:size]]
    finished.sort(key=lambda g: (g.weight_step, g.number))
    chosen = [g.group_id for g in finished[:size]]
    rest = sorted((g for g in groups if g.group_id not in chosen), key=lambda g: g.weight_step)
    unfinished = 0
    for place, group in enumerate(rest, 1):
        unfinished += not group.finished
        due = group.weight_step + bound
        if place > groups_per_step * (due - step) + groups_per_step - taken - size and unfinished:
            return []
    return chosen
