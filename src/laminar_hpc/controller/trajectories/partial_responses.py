"""The partial-response pool: responses so far of trajectories in progress, in the controller's memory only
(Laminar, arXiv 2510.12633, section on the system's workflow).

Fed by increments every rollout.increment_tokens tokens and by moves. What is here can go on elsewhere on the
same weights; what is not starts again from its prompt.
"""

from laminar_hpc.line.messages.data import TOKEN_BYTES, Partial
from laminar_hpc.line.messages.homes import replica_of
from laminar_hpc.line.messages.moves import Answer
from laminar_hpc.line.messages.rollouts import Increment


class PartialResponsePool:
    """Keeps partial responses by trajectory, in memory; see the top of this file."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Partial]] = {}  # trajectory -> (attempt, response so far)
        self.tokens = 0
        self._left: list[str] = []  # environments that stay somewhere, of what has ended or begun again
        self._unparked: list[str] = []  # KV caches at relays that nobody will take up

    def add(self, more: Increment) -> None:
        """Appends; what does not follow on the attempt's tokens here is left out, as it would leave a gap.
        From 0 on it is all that there is: its owner has begun it again, or tells a new controller."""
        attempt, partial = self._held.get(more.trajectory_id, (None, Partial()))
        if attempt != more.attempt and (more.start or (attempt is not None and attempt > more.attempt)):
            return
        if more.start == 0:
            moves = partial.moves if attempt == more.attempt else 0
            self._take_out(more.trajectory_id, more.home)
            partial = Partial(moves=moves)
        if more.start != partial.count:
            return
        partial.tokens += more.tokens
        partial.logprobs += more.logprobs
        for span in more.spans:
            last = partial.spans[-1] if partial.spans else None
            if last and (last.weight_id, last.end) == (span.weight_id, span.start):
                last.end = span.end
            else:
                partial.spans.append(span)
        partial.time_started = more.time_started
        partial.called = more.called
        partial.awaits = more.awaits
        partial.home = more.home
        partial.parked = ""  # its owner has taken it up, or prefilled it
        self._held[more.trajectory_id] = (more.attempt, partial)
        self.tokens += more.count

    def put(self, trajectory_id: int, attempt: int, partial: Partial) -> None:
        """All of a response so far, as it moves."""
        self._take_out(trajectory_id, partial.home, partial.parked)
        self._held[trajectory_id] = (attempt, partial)
        self.tokens += partial.count

    def answered(self, answer: Answer) -> None:
        """What a response so far awaits is there, or will not come."""
        _, partial = self._held.get(answer.trajectory_id, (None, None))
        if partial is None or partial.awaits != answer.name:
            return
        partial.awaits = ""
        if not answer.error:
            partial.called = False
            partial.tokens += answer.tokens
            partial.logprobs += bytes(len(answer.tokens))  # 0.0
            self.tokens += len(answer.tokens) // TOKEN_BYTES

    def awaited_of(self, replica: int) -> list[tuple[int, str]]:
        """Trajectories with others that await an Answer of this replica, and its name. A pass over all."""
        held = [(trajectory_id, partial.awaits) for trajectory_id, (_, partial) in self._held.items()]
        return [(trajectory_id, name) for trajectory_id, name in held if name.startswith(f"{replica}:")]

    def get(self, trajectory_id: int, attempt: int) -> Partial | None:
        """What is known of this very attempt."""
        held, partial = self._held.get(trajectory_id, (None, None))
        return partial if held == attempt else None

    def drop(self, trajectory_id: int) -> int:
        """It has ended or starts again; returns how many tokens were held."""
        return self._take_out(trajectory_id, "")

    def forget_home(self, replica: int) -> list[tuple[int, str]]:
        """What has its environment there ends; returns (trajectory, what it awaits). A pass over all."""
        found = [
            (i, p.awaits) for i, (_, p) in self._held.items() if p.home and replica_of(p.home) == replica
        ]
        for trajectory_id, _ in found:
            self._take_out(trajectory_id, self._held[trajectory_id][1].home)
        return found

    def take_left(self) -> list[str]:
        """The environments whose trajectories have ended or begun again since the last call."""
        left = self._left
        self._left = []
        return left

    def nothing_parked(self, trajectory_id: int, name: str) -> None:
        """No KV cache of that name has come to its relay."""
        _, partial = self._held.get(trajectory_id, (None, None))
        if partial is not None and partial.parked == name:
            partial.parked = ""

    def take_unparked(self) -> list[str]:
        """The names of parked KV caches whose trajectories have ended, begun again or gone on without them
        since the last call."""
        left = self._unparked
        self._unparked = []
        return left

    def _take_out(self, trajectory_id: int, home: str, parked: str = "") -> int:
        """`home`: it keeps this environment; `parked`: and this KV cache."""
        _, partial = self._held.pop(trajectory_id, (None, None))
        if partial is None:
            return 0
        if partial.home not in ("", home):
            self._left.append(partial.home)
        if partial.parked not in ("", parked):
            self._unparked.append(partial.parked)
        self.tokens -= partial.count
        return partial.count

    def __len__(self) -> int:
        return len(self._held)
