"""Who has which unfinished trajectory: kept with each change, so that nobody looks at all of them.

The table of groups (group_table.py) says `note` when a sample has changed, `forget` when a group has gone.
Invariant: all answers are those of a pass over its groups.
"""

from bisect import bisect_left, insort

from laminar_hpc.controller.trajectories.groups import Group, SampleState

_Owned = dict[int, tuple[Group, SampleState]]  # by trajectory


class OwnershipIndex:
    def __init__(self) -> None:
        self._generating: dict[int, _Owned] = {}  # by replica
        self._scoring: dict[int, _Owned] = {}  # by replica
        self._open: dict[int, dict[int, None]] = {}  # by group, trajectories with nobody
        self._oldest: list[tuple[int, int]] = []  # weight step and id of those groups, ascending
        self._keys: dict[int, tuple[int, int]] = {}  # by group, its entry there
        self._at: dict[int, tuple[str, int]] = {}  # by trajectory, where it is noted
        self._turned: set[int] = set()
        self.open_samples = 0  # with nobody
        self.unscored = 0  # complete, without a score, whoever shall give it

    # ---- what happens --------------------------------------------------------------------------------------

    def note(self, group: Group, trajectory_id: int) -> None:
        """A sample of `group` has changed hands or state, or its weights."""
        sample = group.samples[trajectory_id]
        self._drop(group.group_id, trajectory_id)
        if sample.finished:
            return
        replica = -1 if sample.replica is None else sample.replica
        if sample.generated:
            self._at[trajectory_id] = "scoring", replica
            self.unscored += 1
            self._put(self._scoring, replica, group, trajectory_id)
        elif sample.replica is not None:
            self._at[trajectory_id] = "generating", replica
            self._put(self._generating, replica, group, trajectory_id)
        elif not sample.held:
            self._at[trajectory_id] = "open", replica
            self._open.setdefault(group.group_id, {})[trajectory_id] = None
            self.open_samples += 1
        self._order(group)

    def forget(self, group: Group) -> None:
        """It is trained or given up."""
        for trajectory_id in group.samples:
            self._drop(group.group_id, trajectory_id)

    def _put(self, noted: dict[int, _Owned], replica: int, group: Group, trajectory_id: int) -> None:
        owned = noted.setdefault(replica, {})
        if not owned and noted is self._scoring:
            self._turned.add(replica)
        owned[trajectory_id] = group, group.samples[trajectory_id]

    def _drop(self, group_id: int, trajectory_id: int) -> None:
        where, replica = self._at.pop(trajectory_id, ("", -1))
        if where == "open":
            self.open_samples -= 1
            del self._open[group_id][trajectory_id]
            if not self._open[group_id]:
                del self._open[group_id]
                del self._oldest[bisect_left(self._oldest, self._keys.pop(group_id))]
        elif where:
            noted = self._scoring if where == "scoring" else self._generating
            self.unscored -= where == "scoring"
            del noted[replica][trajectory_id]
            if not noted[replica]:
                del noted[replica]
                if where == "scoring":
                    self._turned.add(replica)

    def _order(self, group: Group) -> None:
        """Where it stands among the groups with open samples."""
        if group.group_id not in self._open:
            return
        key, known = (group.view().weight_step, group.group_id), self._keys.get(group.group_id)
        if key != known:
            if known is not None:
                del self._oldest[bisect_left(self._oldest, known)]
            self._keys[group.group_id] = key
            insort(self._oldest, key)

    # ---- who has what --------------------------------------------------------------------------------------

    def oldest_open(self) -> int | None:
        """The group with samples that nobody has, of the oldest weights; of equal ones the first."""
        return self._oldest[0][1] if self._oldest else None

    def open_of(self, group_id: int) -> list[int]:
        """The samples of a group that nobody has."""
        return sorted(self._open.get(group_id, ()))

    def generating(self, replica: int) -> list[tuple[Group, int, SampleState]]:
        """What it has of trajectories without their last token, by group and sample."""
        owned = self._generating.get(replica, {})
        found = [(group, trajectory_id, sample) for trajectory_id, (group, sample) in owned.items()]
        return sorted(found, key=lambda each: (each[0].group_id, each[1]))

    def generating_counts(self) -> dict[int, int]:
        """Counts by replica; replicas that have none are left out."""
        return {replica: len(owned) for replica, owned in self._generating.items()}

    def scoring(self, replica: int) -> list[int]:
        """The complete responses that it is to score, by group and sample."""
        owned = self._scoring.get(replica, {})
        return sorted(owned, key=lambda trajectory_id: (owned[trajectory_id][0].group_id, trajectory_id))

    def scores(self, replica: int) -> bool:
        """Whether it is to score any."""
        return replica in self._scoring

    def take_turned(self) -> set[int]:
        """The replicas of which `scores` may have changed since the last call."""
        turned = self._turned
        self._turned = set()
        return turned
