"""Groups of trajectories as the tracker keeps them, and what it counts."""

from dataclasses import dataclass, field, fields, replace

from laminar_hpc.policies.live_groups import GroupView


@dataclass
class SampleState:
    """A trajectory that is granted or finished. Without an owner it waits to be given out, unless `held`."""

    attempt: int
    weight_step: int
    replica: int | None  # its owner; of a complete response the one that scores it
    held: bool = False  # without an owner, and not to be given out: another replica will go on with it
    finished: bool = False
    generated: bool = False  # complete and stored, not yet scored; it is never generated again
    reward: float = 0.0
    accuracy: float = 0.0
    length: int = 0  # response tokens, once it is complete
    weight_id: int = -1  # that it is generated with, as it was granted
    ungraded: int = 0  # times that its environment failed, as this controller knows

    @property
    def is_open(self) -> bool:
        """Nobody has it, and it may be given out."""
        unowned = self.replica is None and not self.held
        return unowned and not self.finished and not self.generated

    def owned_by(self, replica: int) -> None:
        """From here on, under the next attempt."""
        self.attempt = self.attempt + 1
        self.replica = replica
        self.held = False


@dataclass
class Group:
    """The trajectories of one prompt; `number` is that of its admission."""

    group_id: int
    prompt_index: int
    number: int
    samples: dict[int, SampleState] = field(default_factory=dict)
    finished: bool = False
    finish_order: int = 0

    def view(self) -> GroupView:
        return GroupView(
            self.group_id,
            self.number,
            min(s.weight_step for s in self.samples.values()),
            self.finished,
            self.finish_order,
        )


@dataclass
class Counts:
    """Of completed groups, and of what was lost, since counts were last taken. Tokens are of responses."""

    groups_filtered: int = 0
    tokens_generated: int = 0
    samples_saved: int = 0
    tokens_saved: float = 0.0  # see GroupSize.saved
    # of trajectories that were lost, as far as they were known (pool of partial responses)
    tokens_discarded: int = 0
    reports_refused: int = 0  # from attempts that no longer count

    def take(self) -> "Counts":
        """All of it; from here on it counts from 0."""
        taken = replace(self)
        for each in fields(self):
            setattr(self, each.name, each.default)
        return taken
