"""The groups that are granted and not trained, counted by the weight step that bounds them: what the rules of
policies/admission.py ask of all groups costs as much as there are weight steps and groups taken, never as
there are groups. Pure; live system and simulator use it.

Invariant: `by_step`, `oldest` and `first` say what a pass over all views in the order of their arrival would.

    >>> live = LiveGroups()
    >>> live.put(GroupView(7, 1, 0, finished=False))
    >>> live.put(GroupView(8, 2, 0, finished=True, finish_order=1))
    >>> live.finished, list(live.by_step()), live.oldest(1)
    (1, [(0, 2, 1)], [8])
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple


class GroupView(NamedTuple):
    """What the rules see of a granted, untrained group. `weight_step`: the oldest among its trajectories."""

    group_id: int
    number: int  # at its grant
    weight_step: int
    finished: bool
    finish_order: int = 0  # a counter of finished groups; used without a bound


_Place = tuple[int, int, int]  # what orders it, its arrival, its id


@dataclass
class _AtStep:
    """The groups of one weight step; `finished` by number."""

    groups: int = 0
    finished: list[_Place] = field(default_factory=list)


class LiveGroups:
    def __init__(self) -> None:
        self._views: dict[int, tuple[GroupView, int]] = {}  # with its arrival
        self._arrivals = 0
        self._at: dict[int, _AtStep] = {}  # by weight step
        self._steps: list[int] = []  # the keys of `_at`, ascending
        self._finished: list[_Place] = []  # by the order of finishing

    @property
    def finished(self) -> int:
        """How many wait to be trained."""
        return len(self._finished)

    def __len__(self) -> int:
        return len(self._views)

    def put(self, view: GroupView) -> None:
        """A group is granted, or has changed; it keeps its place among equals."""
        known, arrival = self._views.get(view.group_id, (None, self._arrivals))
        if known == view:
            return
        if known is None:
            self._arrivals += 1
        else:
            self._take_out(known, arrival)
        self._views[view.group_id] = view, arrival
        if view.weight_step not in self._at:
            self._at[view.weight_step] = _AtStep()
            insort(self._steps, view.weight_step)
        at = self._at[view.weight_step]
        at.groups += 1
        if view.finished:
            insort(at.finished, (view.number, arrival, view.group_id))
            insort(self._finished, (view.finish_order, arrival, view.group_id))

    def remove(self, group_id: int) -> None:
        """It is trained or given up."""
        self._take_out(*self._views.pop(group_id))

    def _take_out(self, view: GroupView, arrival: int) -> None:
        at = self._at[view.weight_step]
        at.groups -= 1
        if view.finished:
            del at.finished[bisect_left(at.finished, (view.number, arrival, view.group_id))]
            del self._finished[bisect_left(self._finished, (view.finish_order, arrival, view.group_id))]
        if not at.groups:
            del self._at[view.weight_step]
            del self._steps[bisect_left(self._steps, view.weight_step)]

    def by_step(self) -> Iterator[tuple[int, int, int]]:
        """(weight step, groups, of these finished), oldest weights first."""
        for step in self._steps:
            at = self._at[step]
            yield step, at.groups, len(at.finished)

    def oldest(self, size: int) -> list[int]:
        """Ids of so many finished groups: of the oldest weights, and of these the first granted."""
        places = chain.from_iterable(self._at[step].finished for step in self._steps)
        return [group_id for _, _, group_id in islice(places, size)]

    def first(self, size: int) -> list[int]:
        """Ids of the groups that finished first."""
        return [group_id for _, _, group_id in self._finished[:size]]
