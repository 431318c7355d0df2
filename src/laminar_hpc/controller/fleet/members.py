"""Who is in the run: every worker that has said Hello, and when its newest message came."""

import os
import time
from dataclasses import dataclass, field
from heapq import heappop, heappush

from laminar_hpc.line.messages.membership import Hello
from laminar_hpc.machine.processes import process_is_alive

_ASLEEP_SECONDS = 5.0  # between two looks: this process stood still, not the members
_LOOK_SECONDS = 0.1  # between two looks at the processes of this machine
_PINGS_SECONDS = 5.0  # of silence at least, of one ping a second, before anybody counts as dead
_SURELY_ALIVE_SECONDS = 2.0  # since its last ping, of one a second: no process is started again so fast


@dataclass
class Member:
    """A worker of the run."""

    identity: str
    hello: Hello
    last_seen: float  # monotonic seconds of its newest message
    number: int = 0  # in the order of joining

    @property
    def name(self) -> str:
        return self.hello.name


def rollout_silence(heartbeat_seconds: float) -> float:
    """Seconds of silence after which a rollout that may rejoin is declared dead. A third of the other roles'
    limit: the trainer waits for its trajectories, and a wrong verdict costs only these."""
    return min(heartbeat_seconds, max(_PINGS_SECONDS, heartbeat_seconds / 3))


@dataclass
class Members:
    """`machine` is the controller's own: there a death is seen within _LOOK_SECONDS by the pid, elsewhere by
    silence, of rollouts and of others."""

    machine: str
    heartbeat_seconds: float
    rollout_seconds: float
    by_place: dict[tuple[str, int], Member] = field(default_factory=dict)
    _by_identity: dict[str, Member] = field(default_factory=dict)
    _by_role: dict[str, dict[int, Member]] = field(default_factory=dict)
    _by_machine: dict[tuple[str, str], dict[int, Member]] = field(default_factory=dict)  # and role
    _places: dict[str, str] = field(default_factory=dict)  # machine -> place of its newest relay
    _left: list[str] = field(default_factory=list)
    _joined: int = 0
    _silent_at: list[tuple[float, int, str]] = field(default_factory=list)  # a heap: when, of whom; or later
    _listened: float = field(default_factory=time.monotonic)
    _asked: float = field(default_factory=time.monotonic)
    _looked: float = 0.0  # at the processes of this machine
    _processes: dict[int, dict[str, Member]] = field(default_factory=dict)  # by pid, on this machine

    def join(self, identity: str, hello: Hello) -> Member | None:
        """Takes a worker in; returns the earlier incarnation that it replaces, if there was one."""
        earlier = self.at(hello.role, hello.index)
        if earlier is not None:
            (self.leave if earlier.identity != identity else self._take_out)(earlier)
        self._joined += 1
        member = Member(identity, hello, time.monotonic(), self._joined)
        self.by_place[hello.role, hello.index] = self._by_identity[identity] = member
        self._by_role.setdefault(hello.role, {})[hello.index] = member
        if hello.role == "relay":
            self._places[hello.machine] = hello.place
        self._by_machine.setdefault((hello.machine, hello.role), {})[hello.index] = member
        heappush(self._silent_at, (self._deadline(member), member.number, identity))
        if hello.machine == self.machine and hello.pid != os.getpid():
            self._processes.setdefault(hello.pid, {})[identity] = member
        return earlier

    def rival(self, hello: Hello) -> Member | None:
        """The live process, if any, that has a newcomer's place: a second start must not push it out."""
        member = self.at(hello.role, hello.index)
        if member is None or (member.hello.machine, member.hello.pid) == (hello.machine, hello.pid):
            return None
        if member.hello.place != hello.place:  # no restart of it
            return member
        if member.hello.machine == self.machine:
            return member if process_is_alive(member.hello.pid) else None
        return member if time.monotonic() - member.last_seen < _SURELY_ALIVE_SECONDS else None

    def leave(self, member: Member) -> None:
        self._take_out(member)
        self._left.append(member.identity)

    def _take_out(self, member: Member) -> None:
        hello = member.hello
        if self._by_identity.get(member.identity) is member:
            del self._by_identity[member.identity]
        if self.at(hello.role, hello.index) is member:
            del self.by_place[hello.role, hello.index]
            del self._by_role[hello.role][hello.index]
            there = self._by_machine[hello.machine, hello.role]
            del there[hello.index]
            if not there:
                del self._by_machine[hello.machine, hello.role]
        of_process = self._processes.get(hello.pid, {})
        of_process.pop(member.identity, None)
        if not of_process:
            self._processes.pop(hello.pid, None)

    def take_left(self) -> list[str]:
        """Identities of those who have left since the last call."""
        left = self._left
        self._left = []
        return left

    def of(self, identity: str) -> Member | None:
        return self._by_identity.get(identity)

    def at(self, role: str, index: int = 0) -> Member | None:
        return self.by_place.get((role, index))

    def all(self, role: str) -> list[Member]:
        return _in_order(self._by_role.get(role, {}))

    def count(self, role: str) -> int:
        return len(self._by_role.get(role, {}))

    def place(self, role: str, index: int | None) -> str | None:
        """The place (cluster.place) of a member, that is of its machine's relay, from which its weights come;
        None where there is no such member."""
        member = None if index is None else self.at(role, index)
        return None if member is None else self._places.get(member.hello.machine, member.hello.place)

    def on(self, machine: str, role: str) -> list[Member]:
        """Those of a role on one machine."""
        return _in_order(self._by_machine.get((machine, role), {}))

    # ---- deaths --------------------------------------------------------------------------------------------

    def listened_until(self, then: float) -> None:
        """Whatever had come by `then` (monotonic seconds) was heard: until then a silence counts, and no
        further while messages wait to be read."""
        self._listened = max(self._listened, then)

    def dead(self, look: bool = False) -> list[Member]:
        """Members whose process is gone, or who have been silent for too long, in the order of joining. Costs
        as much as there are deadlines that have passed, of which each member has one in a heartbeat time.
        `look`: at the processes of this machine now."""
        now = time.monotonic()
        if now - self._asked > _ASLEEP_SECONDS:
            for member in self.by_place.values():
                member.last_seen = max(member.last_seen, now)
        self._asked = now
        found = {member.number: member for member in self._silent() + self._gone(now, look)}
        return [found[number] for number in sorted(found)]

    def _silent(self) -> list[Member]:
        silent, later = [], []
        while self._silent_at and self._silent_at[0][0] < self._listened:
            _, number, identity = heappop(self._silent_at)
            member = self._by_identity.get(identity)
            if member is None or member.number != number:
                continue  # it has left
            deadline = self._deadline(member)
            later.append((deadline, number, identity))
            if deadline < self._listened:
                silent.append(member)
        for entry in later:
            heappush(self._silent_at, entry)
        return silent

    def _deadline(self, member: Member) -> float:
        is_rollout = member.hello.role == "rollout"
        return member.last_seen + (self.rollout_seconds if is_rollout else self.heartbeat_seconds)

    def _gone(self, now: float, look: bool) -> list[Member]:
        if not look and now - self._looked < _LOOK_SECONDS:
            return []
        self._looked = now
        dead = [members for pid, members in self._processes.items() if not process_is_alive(pid)]
        if dead:
            self._looked = 0.0  # whoever is not taken out now is found again
        return [member for members in dead for member in members.values()]


def _in_order(members: dict[int, Member]) -> list[Member]:
    return [members[index] for index in sorted(members)]
