"""One trajectory on a replica, from its grant to its last token: what is known of it, and a state machine.

    GENERATING <--waiting()--> WAITING       it waits for a tool and has no request in the engine
        |                         |
        '-----------+-------------'
                    |--strand()--> STRANDED  its local batch has failed: it goes on elsewhere, if it can
                    |                 |
                    '-----------------'--drop()--> DROPPED   the controller has given it to others

A trajectory that is stranded or dropped stays so; any other step that the table does not name raises
WrongState. Two facts are no states, because they hold in several of them: a `move` that takes the trajectory
away, which must be brought to its end even if the trajectory is dropped meanwhile, and `bound`: its
environment cannot follow it, so that it goes on here or begins again.

    >>> trajectory = TrajectoryInFlight(7, 0, PromptGroup(1, [5], "", {}, []), 0, 0, 1.0, 100)
    >>> with trajectory.waiting():
    ...     move = trajectory.leave(MoveOrder("m", 7, 0, ""))
    >>> trajectory.state, trajectory.may_leave, move.order.move_id
    (<State.GENERATING: 'generating'>, False, 'm')
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from laminar_hpc.config.routing import RouteShape
from laminar_hpc.engine.interface import Generation
from laminar_hpc.environments.reward_pool import Score
from laminar_hpc.environments.turns.episode import Episode
from laminar_hpc.environments.turns.history import History
from laminar_hpc.environments.turns.session import Session
from laminar_hpc.line.messages.data import TOKEN_BYTES, Partial, PromptGroup, Sample, Trajectory, VersionSpan
from laminar_hpc.line.messages.moves import MoveOrder
from laminar_hpc.line.messages.rollouts import Grant, Increment, Unfinished
from laminar_hpc.rollout.partial_response import cut, extended, given, joined, logprobs_of, tokens_of
from laminar_hpc.rollout.routes import asked_from, cut_routes, taken_up, whole_routes, with_routes
from laminar_hpc.rollout.state import WrongState
from laminar_hpc.store.payload.layout import Response, Tokens, drawn, pack, packed_digest
from laminar_hpc.store.payload.routes import pack_routes


class State(Enum):
    """What a trajectory is doing, see the top of this file."""

    GENERATING = "generating"
    WAITING = "waiting"
    STRANDED = "stranded"
    DROPPED = "dropped"


_NEXT = {
    State.GENERATING: (State.WAITING, State.STRANDED, State.DROPPED),
    State.WAITING: (State.GENERATING, State.STRANDED, State.DROPPED),
    State.STRANDED: (State.DROPPED,),
    State.DROPPED: (),
}


@dataclass(frozen=True)
class Outcome:
    """How a trajectory ended on this replica: it is with another one, is lost for a reason, or else is whole.
    `ungraded`: it is lost because its environment failed so many times."""

    moved_away: bool = False
    lost: str | None = None
    ungraded: int = 0


@dataclass
class OrderedMove:
    """A move that is to take the trajectory away. `sent`: the source's part of the order is done."""

    order: MoveOrder
    sent: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class TrajectoryInFlight:
    """A trajectory that this replica owns. `weight_id` and `weight_step` are those that it began with;
    `failures` counts those of its environments, here and at other replicas."""

    trajectory_id: int
    attempt: int
    group: PromptGroup
    weight_id: int
    weight_step: int
    temperature: float
    max_response_tokens: int
    evaluation: str = ""
    partial: Partial = field(default_factory=Partial)
    failures: int = 0
    finish_reason: str = ""
    starts: list[int] = field(default_factory=list)  # of its later branches, among the response's tokens
    route_shape: RouteShape | None = None  # where its routes are kept: rollout/routes.py
    siblings: list[bytes] = field(default_factory=list)  # tokens of finished samples: rollout/siblings.py
    foreign: bytes = b""  # of them, what came from another replica and its engine has not been told

    state: State = field(default=State.GENERATING, init=False)
    move: OrderedMove | None = field(default=None, init=False)
    bound: bool = False
    stirred: asyncio.Event = field(default_factory=asyncio.Event)  # what waits for a tool looks at it again

    request_id: str | None = None  # while the engine has it
    of_request: Partial | None = None  # the increments of its present request
    cached_tokens: int = 0  # of its first prefill here, taken from the prefix cache
    waited: float = 0.0  # seconds that its present turn waited for a place among the requests
    told: int = field(default=0, init=False)  # response tokens that the controller's pool knows

    episode: Episode | None = None  # if it has several turns
    session: Session | None = None  # its environment
    history: History | None = None  # its turns, if they may begin a branch
    score: Score | None = None  # its agent's

    def __post_init__(self) -> None:
        self.told = self.partial.count

    # ---- its state -----------------------------------------------------------------------------------------

    def _become(self, state: State) -> None:
        if state not in _NEXT[self.state]:
            raise WrongState(
                f"trajectory {self.trajectory_id} (attempt {self.attempt}) cannot become {state.value}: "
                f"it is {self.state.value}"
            )
        self.state = state
        self.stirred.set()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for a tool."""
        if self.state not in (State.STRANDED, State.DROPPED):
            self._become(State.WAITING)
            self.stirred.clear()
        try:
            yield
        finally:
            if self.state is State.WAITING:
                self._become(State.GENERATING)

    def strand(self) -> None:
        """The trajectory's local batch has failed."""
        if not self.is_dropped():
            self._become(State.STRANDED)

    def drop(self) -> None:
        """The controller has given it to others, and may say so more than once."""
        if not self.is_dropped():
            self._become(State.DROPPED)

    def is_dropped(self) -> bool:
        return self.state is State.DROPPED

    @property
    def may_leave(self) -> bool:
        """A move can take it away now."""
        runs = self.state is State.WAITING or (self.state is State.GENERATING and self.request_id is not None)
        return runs and not self.bound and self.move is None

    def leave(self, order: MoveOrder) -> OrderedMove:
        """A move is to take it away."""
        if not self.may_leave:
            raise WrongState(f"trajectory {self.trajectory_id} cannot leave: it is {self.state.value}")
        self.move = OrderedMove(order)
        self.stirred.set()
        return self.move

    def stay(self) -> None:
        """The trajectory's move has been called off."""
        self.move = None
        self.stirred.clear()

    # ---- its response --------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Response tokens that it may still get."""
        return self.max_response_tokens - self.partial.count

    def sampling_seed(self, seed: int) -> int:
        """The seed of its present branch in the run of `seed`; the engine adds the place of each token. It is
        the same at every replica and in every attempt, so that what goes on elsewhere is drawn as it would
        have been."""
        name = f"{seed} {self.trajectory_id} {len(self.starts)}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 1

    def streamed(self, weight_id: int, tokens: bytes, logprobs: bytes) -> Increment:
        """An increment of its present request has come, as columns: what the controller is told."""
        before = self.of_request or Partial()
        so_far = Partial(before.tokens + tokens, before.logprobs + logprobs)
        so_far.spans = [VersionSpan(weight_id, 0, so_far.count)]
        self.of_request = so_far
        start = self.partial.count + before.count
        self.told = self.partial.count + so_far.count
        told = (self.trajectory_id, self.attempt, start, tokens, logprobs)
        span = VersionSpan(weight_id, start, self.told)
        return Increment(*told, [span], self.partial.time_started, home=self.partial.home)

    def give(self, tokens: Sequence[int]) -> None:
        """The environment gives these tokens."""
        self.partial = given(self.partial, tokens)

    def cut(self, count: int) -> None:
        """Its response ends after so many tokens, if it has more: its turn was stopped there."""
        if count < self.partial.count:
            self.partial = cut(self.partial, count)
            if self.route_shape is not None:
                self.partial = cut_routes(self.partial, self.prompt_length, self.route_shape)
            self.finish_reason = "stop"

    def branch(self) -> None:
        """What is given next begins a sequence of its own."""
        self.starts.append(self.partial.count)

    @property
    def sequence(self) -> Tokens:
        """What the model sees: prompt and response, or the present branch."""
        tokens = tokens_of(self.partial)
        if self.starts:
            return tokens[self.starts[-1] :]
        return np.concatenate((np.array(self.group.prompt_tokens, np.int32), tokens))

    @property
    def prompt_length(self) -> int:
        """Tokens of its prompt."""
        return len(self.group.prompt_tokens)

    def asks_routes_from(self) -> int | None:
        """The first token of `sequence` whose route the engine is to tell; None: of none."""
        if self.route_shape is None:
            return None
        start = self.starts[-1] if self.starts else 0
        self.partial, first = asked_from(self.partial, self.prompt_length, start, self.route_shape)
        return first

    def add(self, generation: Generation) -> None:
        """Its last request has ended so. Raises DamagedResponse for what cannot be trained."""
        more = extended(self.partial, generation)
        if self.route_shape is not None:
            more = with_routes(more, self.prompt_length, generation, self.route_shape)
        self.partial = more
        self.of_request = None

    def begin_again(self) -> None:
        """It begins again from its prompt."""
        self.partial = Partial(moves=self.partial.moves)
        self.starts = []
        self.told = 0

    # ---- what others are told of it ------------------------------------------------------------------------

    @property
    def is_told(self) -> bool:
        """The controller's pool keeps its tokens: somebody else could go on with them."""
        return not (self.evaluation or self.bound)

    @property
    def so_far(self) -> Partial:
        """What somebody else can go on with, the increments of its present request included."""
        if self.bound:
            return Partial()
        return joined(self.partial, self.of_request) if self.of_request else self.partial

    def increment(self, start: int) -> Increment:
        """Its tokens so far from `start` on, which the controller's pool knows from now on."""
        known = self.so_far
        spans = [VersionSpan(s.weight_id, max(s.start, start), s.end) for s in known.spans if s.end > start]
        columns = known.tokens[TOKEN_BYTES * start :], known.logprobs[TOKEN_BYTES * start :]
        self.told = known.count
        told = (self.trajectory_id, self.attempt, start, *columns, spans, known.time_started)
        return Increment(*told, known.called, known.awaits, known.home)

    def unfinished(self) -> Unfinished:
        """This replica cannot go on with it."""
        return Unfinished(self.trajectory_id, self.attempt, self.so_far)

    def packed(self) -> bytes:
        """Packs the whole response for a payload file."""
        partial = self.partial
        runs = drawn(partial.count, partial.spans, self.starts)
        whole = tokens_of(partial), logprobs_of(partial), partial.spans, runs
        return pack(Response(self.trajectory_id, self.attempt, *whole))

    def packed_routes(self) -> bytes:
        """Packs its routes, which lie behind the response; nothing where none are kept."""
        if self.route_shape is None:
            return b""
        rows = whole_routes(self.partial, self.prompt_length, self.route_shape)
        return pack_routes(self.trajectory_id, self.attempt, rows)

    def finished(self, replica: int, response: bytes) -> Trajectory:
        """What is said of it when it has its last token, now; `response`: packed."""
        partial = self.partial
        return Trajectory(
            turns=self.episode.turns if self.episode else 1,
            trajectory_id=self.trajectory_id,
            group_id=self.group.group_id,
            attempt=self.attempt,
            replica=replica,
            weight_id=self.weight_id,
            weight_step=self.weight_step,
            length=partial.count,
            trained=partial.trained,
            policies=len(partial.weight_ids),
            finish_reason=self.finish_reason,
            time_started=partial.time_started,
            time_finished=time.time(),
            moves=partial.moves,
            digest=packed_digest(response),
        )


def granted(grant: Grant, shape: RouteShape | None = None) -> list[TrajectoryInFlight]:
    """The trajectories of a grant, group by group; `shape`: of the routes that are kept for training."""
    kept = None if grant.evaluation else shape

    def one(group: PromptGroup, sample: Sample, siblings: list[bytes]) -> TrajectoryInFlight:
        partial = grant.parts.get(sample.trajectory_id) or Partial()
        return TrajectoryInFlight(
            sample.trajectory_id,
            sample.attempt,
            group,
            grant.weight_id,
            grant.weight_step,
            grant.temperature,
            grant.max_response_tokens,
            grant.evaluation,
            taken_up(partial, len(group.prompt_tokens), kept) if kept else partial,
            failures=sample.ungraded,
            route_shape=kept,
            siblings=siblings,
        )

    groups = [(group, list[bytes]()) for group in grant.groups]
    return [one(group, sample, siblings) for group, siblings in groups for sample in group.samples]
