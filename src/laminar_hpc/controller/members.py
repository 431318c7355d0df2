"""Who is in the run: every worker that has said Hello, when it was last heard, and the epochs in which trainer and relays are linked."""

import os
import time
from dataclasses import dataclass, field

from laminar_hpc.cluster.processes import process_is_alive
from laminar_hpc.messages import Hello

_QUIET_SECONDS = 0.5  # a new epoch is proposed when no relay or trainer has come or gone for so long


@dataclass
class Member:
    identity: str
    hello: Hello
    heard: float  # monotonic seconds

    @property
    def name(self) -> str:
        return f"{self.hello.role} {self.hello.index}"


@dataclass
class Members:
    """`machine` is the controller's own: there a death is seen at once by the pid, elsewhere by silence."""

    machine: str
    heartbeat_seconds: float
    by_place: dict[tuple[str, int], Member] = field(default_factory=dict)
    epoch: int = 0
    chain: list[int] = field(default_factory=list)
    _changed: float | None = None

    def join(self, identity: str, hello: Hello) -> Member | None:
        """Takes a worker in; returns the earlier incarnation that it replaces, if there was one."""
        place = (hello.role, hello.index)
        earlier = self.by_place.get(place)
        self.by_place[place] = Member(identity, hello, time.monotonic())
        if hello.role == "relay" or place == ("trainer", 0):
            self._changed = time.monotonic()
        return earlier

    def leave(self, member: Member) -> None:
        self.by_place.pop((member.hello.role, member.hello.index), None)
        if member.hello.role == "relay":
            self._changed = time.monotonic()

    def of(self, identity: str) -> Member | None:
        role, index, _ = identity.split(":", 2)
        member = self.by_place.get((role, int(index)))
        return member if member and member.identity == identity else None

    def at(self, role: str, index: int = 0) -> Member | None:
        return self.by_place.get((role, index))

    def all(self, role: str) -> list[Member]:
        return sorted((m for m in self.by_place.values() if m.hello.role == role), key=lambda m: m.hello.index)

    def dead(self) -> list[Member]:
        """Members whose process is gone, or who have been silent for too long."""
        now = time.monotonic()
        here = [m for m in self.by_place.values() if m.hello.machine == self.machine and m.hello.pid != os.getpid()]
        return [
            m for m in self.by_place.values() if (m in here and not process_is_alive(m.hello.pid)) or now - m.heard > self.heartbeat_seconds
        ]

    def link_down(self) -> None:
        """A link of the epoch broke without a death: form a new one."""
        self._changed = time.monotonic()

    def propose_epoch(self, relays_wanted: int) -> int | None:
        """The number of a new epoch when trainer 0 and enough relays are there and things have been quiet; else None."""
        relays = self.all("relay")
        if (
            self._changed is None
            or time.monotonic() - self._changed < _QUIET_SECONDS
            or not self.at("trainer")
            or len(relays) < relays_wanted
            or not relays
        ):
            return None
        self._changed = None
        self.epoch += 1
        self.chain = [m.hello.index for m in relays]
        return self.epoch
