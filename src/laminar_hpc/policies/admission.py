"""Who may generate, and what is trained next: the staleness bound by admission, never by discarding. Pure; live system and simulator use
it.

With G groups per step and a bound b, group number n (granted minus given up, itself included) may go to a replica whose weights are of
step p only if floor((n - 1) / G) <= p + b; it is then due at step p + b. The trainer takes finished groups by due step, oldest first, and
waits at step s only if what would remain could no longer all be trained by its due step.

Proof that no group is trained after its due step. Let due(t) be the number of groups granted, not yet trained and due by step t.
Invariant, at the start of step s: due(t) <= G * (t - s + 1) for all t >= s.
  - Training step s takes G groups. `choose` lets it go on only if the rest satisfies due(t) <= G * (t - s) for all t >= s, which is the
    invariant at s + 1. Waiting until all granted groups have finished always makes that possible: taking the G earliest due lowers
    due(t) to at most max(0, due(t) - G).
  - A grant at number n to weights of step p: the batches of steps before s are trained, so at most n - G * s groups remain with it, and
    n <= G * (p + b + 1) by admission. So due(t) <= G * (p + b + 1 - s) <= G * (t - s + 1) for all t >= p + b; smaller t do not count it.
  - A group given up, or redone on newer weights, only lowers due(t).
At step s the invariant gives due(s) <= G, all of which are taken: none is late.

Taking finished groups in the order of their grants, and waiting only for unfinished ones with p <= s - b, does not hold the bound:
G = 1, b = 2, three groups of step 0 of which one is trained at step 0, a fourth of step 1 that finishes first and is trained at step 1;
then two groups are due at step 2, and one of them is late. Hence the look at all t above.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupView:
    """What the rules see of a granted, untrained group. `weight_step` is the oldest among its trajectories."""

    group_id: int
    number: int  # at its grant
    weight_step: int
    finished: bool
    finish_order: int = 0  # a counter of finished groups; used without a bound


@dataclass(frozen=True)
class Choice:
    """Either the groups to train on, or the reason to wait."""

    group_ids: list[int]
    reason: str = ""


def quota(weight_step: int, counted: int, groups_per_step: int, steps: int, max_staleness: int | None) -> int:
    """How many more groups a replica with weights of step `weight_step` may be granted.

    `counted` is the number of groups granted and not given up in the whole run; no more than the run's `steps` will train are granted.
    """
    last = groups_per_step * steps
    if max_staleness is not None:
        last = min(last, groups_per_step * (weight_step + max_staleness + 1))
    return max(0, last - counted)


def choose(
    step: int, groups: Iterable[GroupView], groups_per_step: int, max_staleness: int | None, taken: int = 0, size: int | None = None
) -> Choice:
    """The next `size` groups (default: a whole batch) of step `step`, of which `taken` are trained, out of all granted, untrained groups.

    With mini-batches (consumption as a stream) the invariant reads due(t) <= G * (t - s + 1) - taken, and the rest may fill what remains
    of step s as well.
    """
    groups = list(groups)
    size = groups_per_step if size is None else size
    left = groups_per_step - taken - size
    finished = [g for g in groups if g.finished]
    if len(finished) < size:
        return Choice([], f"{len(finished)} of {size} groups are finished")
    if max_staleness is None:
        return Choice([g.group_id for g in sorted(finished, key=lambda g: g.finish_order)[:size]])
    finished.sort(key=lambda g: (g.weight_step, g.number))
    chosen = {g.group_id for g in finished[:size]}
    rest = sorted((g for g in groups if g.group_id not in chosen), key=lambda g: g.weight_step)
    unfinished = 0
    for position, group in enumerate(rest):
        unfinished += not group.finished
        due = group.weight_step + max_staleness
        if position + 1 > groups_per_step * (due - step) + left and unfinished:
            return Choice([], f"{unfinished} unfinished groups of weight step {group.weight_step} or older are needed by step {due}")
    return Choice([g.group_id for g in finished[:size]])
