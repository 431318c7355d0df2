"""Who is in the run: every worker that has said Hello, and when its newest message came."""

import os
import time
from dataclasses import dataclass, field

from laminar_hpc.cluster.processes import process_is_alive
from laminar_hpc.messages.membership import Hello

_ASLEEP_SECONDS = 5.0  # between two looks: this process stood still, not the members
_SURELY_ALIVE_SECONDS = 2.0  # since its last ping, of one a second: no process is started again so fast


@dataclass
class Member:
    identity: str
    hello: Hello
    last_seen: float  # monotonic seconds of its newest message

    @property
    def name(self) -> str:
        return self.hello.name


@dataclass
class Members:
    """`machine` is the controller's own: there a death is seen at once by the pid, elsewhere by silence."""

    machine: str
    heartbeat_seconds: float
    by_place: dict[tuple[str, int], Member] = field(default_factory=dict)
    _by_identity: dict[str, Member] = field(default_factory=dict)
    _left: list[str] = field(default_factory=list)
    _looked: float = field(default_factory=time.monotonic)

    def join(self, identity: str, hello: Hello) -> Member | None:
        """Takes a worker in; returns the earlier incarnation that it replaces, if there was one."""
        place = (hello.role, hello.index)
        earlier = self.by_place.get(place)
        if earlier and earlier.identity != identity:
            self.leave(earlier)
        self.by_place[place] = self._by_identity[identity] = Member(identity, hello, time.monotonic())
        return earlier

    def rival(self, hello: Hello) -> Member | None:
        """The live process, if any, that has a newcomer's place: a second start must not push it out."""
        member = self.at(hello.role, hello.index)
        if member is None or (member.hello.machine, member.hello.pid) == (hello.machine, hello.pid):
            return None
        if member.hello.machine == self.machine:
            return member if process_is_alive(member.hello.pid) else None
        return member if time.monotonic() - member.last_seen < _SURELY_ALIVE_SECONDS else None

    def leave(self, member: Member) -> None:
        self.by_place.pop((member.hello.role, member.hello.index), None)
        self._by_identity.pop(member.identity, None)
        self._left.append(member.identity)

    def take_left(self) -> list[str]:
        """Identities of those who have left since the last call."""
        left, self._left = self._left, []
        return left

    def of(self, identity: str) -> Member | None:
        return self._by_identity.get(identity)

    def at(self, role: str, index: int = 0) -> Member | None:
        return self.by_place.get((role, index))

    def all(self, role: str) -> list[Member]:
        return sorted(
            (m for m in self.by_place.values() if m.hello.role == role), key=lambda m: m.hello.index
        )

    def dead(self) -> list[Member]:
        """Members whose process is gone, or who have been silent for too long."""
        now = time.monotonic()
        if now - self._looked > _ASLEEP_SECONDS:
            for member in self.by_place.values():
                member.last_seen = now
        self._looked = now
        here = [
            m
            for m in self.by_place.values()
            if m.hello.machine == self.machine and m.hello.pid != os.getpid()
        ]
        return [
            m
            for m in self.by_place.values()
            if (m in here and not process_is_alive(m.hello.pid)) or now - m.last_seen > self.heartbeat_seconds
        ]
