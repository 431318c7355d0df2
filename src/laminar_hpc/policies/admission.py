"""Who may generate, and what is trained next: the staleness bound by admission, never by discarding. Pure;
live system and simulator use it.

With G groups per step and a bound b, group number n (granted minus given up, itself included) may go to a
replica whose weights are of step p only if floor((n - 1) / G) <= p + b; it is then due at step p + b. Where
the bound adapts, b is that of step p (policies/staleness.py): decided before the first grant on p, and p + b
never falls as p grows; nothing below uses more than that. The
trainer takes finished groups by due step, oldest first, and waits at step s only if what would remain could
no longer all be trained by its due step.

Proof that no group is trained after its due step. Let due(t) be the number of groups granted, not yet trained
and due by step t. Invariant, at the start of step s: due(t) <= G * (t - s + 1) for all t >= s.
  - Training step s takes G groups. `choose` lets it go on only if the rest satisfies due(t) <= G * (t - s)
    for all t >= s, which is the invariant at s + 1. Waiting until all granted groups have finished always
    makes that possible: taking the G earliest due lowers due(t) to at most max(0, due(t) - G).
  - A grant at number n to weights of step p: the batches of steps before s are trained, so at most n - G * s
    groups remain with it, and n <= G * (p + b + 1) by admission. So due(t) <= G * (p + b + 1 - s)
    <= G * (t - s + 1) for all t >= p + b; smaller t do not count it.
  - A group given up, or redone on newer weights, only lowers due(t). A group whose samples are granted in
    several rounds counts from its first grant to its last score as one unfinished group whose p is the
    smallest of its samples'.
  - Samples of a granted group that go to older weights (lost ones, later rounds, or all of them after a
    restore) lower its p, which raises due(t) between the new due step and the old one. `may_go_on` allows it
    only where the invariant still holds.
  - A restore to step r < s brings back what steps r to s - 1 trained, which was due at its step or later: of
    steps up to t at most G * (t - r + 1) groups, and no live group is due before s. So the invariant holds at
    r. Groups of the steps that are lost keep their p, which may be larger than r: they are due at p + b as
    ever, and where they are trained before step p their staleness is negative. Their tokens came from a
    policy that is not among the ancestors of the one that trains them, and their behaviour log-probs are that
    policy's, so the importance ratio is right. Weights of a lost step p that are still served count as those
    of step r, where the ways part: what is granted on them is due at r + b.
  - p is that of the grant, not of the replica: where a replica holds several weights at once
    (refresh=versions) each of them counts as a replica of its own, and what goes on beside a grant on newer
    weights keeps its p.
At step s the invariant gives due(s) <= G, all of which are taken: none is late. And due(t) = 0 for t < s, so
all that is not trained at step s is on weights of steps s - b and later: policies/refill.py `held`.

Giving up starves nobody. A given-up group lowers the number of groups counted, so n and the bound above stay
as they were: of the n - 1 groups counted before a grant, G * s are trained and the rest are the live ones. If
fewer than G live groups are left and all are finished, then n <= G * (s + 1), so a replica with the weights
of step s (b >= 0) may be granted another; with G or more, all finished, `choose` takes a batch. Filtering
therefore ends only with a group that differs, or by `filtering.exhausted`. Nor does `may_go_on`: where it
refuses the unfinished group of the smallest p, all groups due before are finished or in progress, and there
are at least G of them.

Taking finished groups in the order of their grants, and waiting only for unfinished ones with p <= s - b,
does not hold the bound: G = 1, b = 2, three groups of step 0 of which one is trained at step 0, a fourth of
step 1 that finishes first and is trained at step 1; then two groups are due at step 2, and one of them is
late. Hence the check of all t above.
"""

from dataclasses import dataclass

from laminar_hpc.policies.live_groups import GroupView, LiveGroups
from laminar_hpc.policies.staleness import StepBounds


@dataclass(frozen=True)
class Choice:
    """Either the groups to train on, or the reason to wait."""

    group_ids: list[int]
    reason: str = ""


def _due(weight_step: int, bound: int | StepBounds) -> int:
    return bound.due(weight_step) if isinstance(bound, StepBounds) else weight_step + bound


def quota(weight_step: int, counted: int, groups_per_step: int, steps: int, max_staleness: int | None) -> int:
    """How many more groups a replica with weights of step `weight_step` may be granted.

    `counted` is the number of groups granted and not given up in the whole run; no more than the run's
    `steps` will train are granted.
    """
    last = groups_per_step * steps
    if max_staleness is not None:
        last = min(last, groups_per_step * (weight_step + max_staleness + 1))
    return max(0, last - counted)


def bound_holds_back(
    step: int, groups: LiveGroups, size: int, counted: int, groups_per_step: int, bound: StepBounds
) -> bool:
    """Whether the bound is in the way of a trainer that waits at `step` for `size` groups: they are finished
    and others are due too soon, or nothing more is granted, not even on the newest weights."""
    return groups.finished >= size or counted >= groups_per_step * (bound.due(step) + 1)


def bound_to_spare(step: int, groups: LiveGroups, groups_per_step: int, bound: StepBounds, left: int) -> bool:
    """Whether a bound smaller by one would have let the trainer go on as well when it took what it just took
    for `step`, which `left` groups are still to come for. The groups granted last would not be there, as many
    as a step takes: finished ones are left without them, and nothing unfinished would be due too soon."""
    there, rest, unfinished = len(groups) - groups_per_step, 0, 0
    for weight_step, count, finished in groups.by_step():
        rest += count
        unfinished += count - finished
        room = groups_per_step * (bound.due(weight_step) - 1 - step) + left
        if unfinished and min(rest, there) > room:
            return False
    return groups.finished >= groups_per_step


def may_go_on(
    group: GroupView,
    weight_step: int,
    step: int,
    groups: LiveGroups,
    groups_per_step: int,
    bound: int | StepBounds | None,
    taken: int = 0,
) -> bool:
    """Whether samples of a granted group may be generated with weights of step `weight_step` while the
    trainer is at step `step`, of which `taken` groups are trained. What is refused to one group is refused to
    all that are due later."""
    if bound is None or weight_step >= group.weight_step:
        return True
    # `group` itself is due behind all t below, so it is not among those that are counted
    rows, due_by_t = groups.by_step(), 0
    row = next(rows, None)
    for t in range(_due(weight_step, bound), _due(group.weight_step, bound)):
        while row is not None and _due(row[0], bound) <= t:
            due_by_t += row[1]
            row = next(rows, None)
        if 1 + due_by_t > groups_per_step * (t - step + 1) - taken:
            return False
    return True


def choose(
    step: int,
    groups: LiveGroups,
    groups_per_step: int,
    max_staleness: int | StepBounds | None,
    taken: int = 0,
    size: int | None = None,
) -> Choice:
    """The next `size` groups (default: a whole batch) of step `step`, of which `taken` are trained, out of
    all granted, untrained groups.

    With mini-batches (consumption as a stream) the invariant reads due(t) <= G * (t - s + 1) - taken, and the
    rest may fill what remains of step s as well.
    """
    size = groups_per_step if size is None else size
    if groups.finished < size:
        return Choice([], f"{groups.finished} of {size} groups are finished")
    if max_staleness is None:
        return Choice(groups.first(size))
    left, rest, unfinished, to_choose = groups_per_step - taken - size, 0, 0, size
    for weight_step, count, finished in groups.by_step():
        chosen = min(finished, to_choose)
        to_choose -= chosen
        rest += count - chosen
        unfinished += count - finished
        due = _due(weight_step, max_staleness)
        if rest > groups_per_step * (due - step) + left and unfinished:
            which = f"{unfinished} unfinished groups of weight step {weight_step} or older"
            return Choice([], f"{which} are needed by step {due}")
    return Choice(groups.oldest(size))
