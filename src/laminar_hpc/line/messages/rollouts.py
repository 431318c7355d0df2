"""Rollouts and the controller: weights that are served, local batches, responses and their scores."""

import msgspec

from laminar_hpc.line.messages.data import (
    TOKEN_BYTES,
    Message,
    Partial,
    PromptGroup,
    ResponsePlace,
    Sample,
    Trajectory,
    VersionSpan,
)


class WeightsOpened(Message):
    """A replica has loaded and verified these weights. `probe_logprobs`: its log-probs of the fixed probe;
    `model_logprobs`: those of the model alone, where the weights are an adapter."""

    weight_id: int
    weight_step: int
    seconds: float
    parts: dict[str, float]
    probe_logprobs: list[float]
    time: float
    model_logprobs: list[float] = msgspec.field(default_factory=list)


class RequestWork(Message):
    """An idle replica at this id asks for a local batch; it supersedes an earlier request of the same
    replica. `newest_batch`: the newest that it was granted in this life, None before the first; a request
    that a grant crossed on its way is void. `ahead`: it still generates, on other weights perhaps; the grant
    brings it to load these. `room`: with refresh=versions it generates others meanwhile, and can begin so
    many trajectories beside them."""

    weight_id: int
    newest_batch: int | None = None
    room: int | None = None
    ahead: bool = False


class Grant(Message):
    """A local batch: a closed set of groups on one weight id. `evaluation` names the evaluation it belongs
    to, "" for training.

    `parts`: responses so far, by trajectory, of those that go on from a replica that is dead. Then the
    replica may serve other weights, or none yet: it loads these from a slot that still holds them. Answer if
    there is none: NotLoaded. `ahead`: rows of the replica's next local batch and how many samples each will
    have, where environments are to be reset; a hint.
    """

    batch_id: int
    weight_id: int
    weight_step: int
    groups: list[PromptGroup]
    temperature: float
    max_response_tokens: int
    evaluation: str = ""
    parts: dict[int, Partial] = msgspec.field(default_factory=dict)
    ahead: list[tuple[dict, int]] = msgspec.field(default_factory=list)


class NotLoaded(Message):
    """The weights of this grant are in no slot any more; nothing was begun, and the replica asks again."""

    batch_id: int
    reason: str


class Generated(Message):
    """The last token of a trajectory was generated, and its response is in a payload file, on the disk: it is
    never generated again. Its score follows in Scored. `home`: its environment, with another replica, which
    grades it; `figures` of its turns go with its score."""

    trajectory: Trajectory
    evaluation: str = ""
    home: str = ""
    figures: dict[str, float] = msgspec.field(default_factory=dict)


class Scored(Message):
    """The reward of a response, by whoever computed it; `parts` by name."""

    trajectory_id: int
    attempt: int
    reward: float
    parts: dict[str, float]
    error: str  # "" | what the reward function did wrong
    time: float
    evaluation: str = ""
    refused: str = ""  # why the first refused request of its agent was


class ScoreOrder(Message):
    """Controller to a replica: score this response, whose own replica has died before its score came. `group`
    is without samples. Answer: Scored; the first that comes counts. Or Lost, where `place` does not hold the
    response any more. `home`, `figures`: as in Generated; that environment grades it."""

    trajectory_id: int
    attempt: int
    group: PromptGroup
    place: ResponsePlace
    home: str = ""
    figures: dict[str, float] = msgspec.field(default_factory=dict)


class Lost(Message):
    """This attempt came to nothing (engine error, mixed versions, a damaged payload); the controller gives
    the sample out again. `ungraded`: its environment failed so many times at this replica; the
    controller gives its group up before it tries for ever."""

    trajectory_id: int
    attempt: int
    reason: str
    evaluation: str = ""
    ungraded: int = 0


class Leaving(Message):
    """A replica was told to end, and will within seconds: it gets nothing new, and what it generates moves to
    others while it goes on with it."""


class EngineHung(Message):
    """Another engine starts in place of one that made no progress. Unfinished follows for its responses."""

    reason: str


class Unfinished(Message):
    """The replica cannot go on with this trajectory: it leaves, or its engine hangs. `partial` is the
    response so far, as far as it knows it."""

    trajectory_id: int
    attempt: int
    partial: Partial


class Increment(Message):
    """More of a response, for the partial-response pool: its tokens from `start` on, as in Partial."""

    trajectory_id: int
    attempt: int
    start: int
    tokens: bytes
    logprobs: bytes
    spans: list[VersionSpan]  # of these tokens; places count from the beginning of the response
    time_started: float
    called: bool = False  # as in Partial
    awaits: str = ""
    home: str = ""

    @property
    def count(self) -> int:
        """How many tokens it brings."""
        return len(self.tokens) // TOKEN_BYTES


class Holds(Message):
    """From a replica that has joined anew, before it asks for work again: the verified weights that it
    serves, its newest local batch, and the trajectories for training that it generates or scores. `moves`:
    those that have been imported here and are not committed yet."""

    weight_id: int | None
    newest_batch: int | None
    generating: list[Sample]
    scoring: list[Sample]
    moves: list[str]


class Drop(Message):
    """To a replica: these attempts are not its own any more; nobody waits for them."""

    samples: list[Sample]


class WeightsAvailable(Message):
    """Controller to the rollouts of one machine: their relay holds these weights now."""

    weight_id: int
    weight_step: int
