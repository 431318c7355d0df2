"""What messages carry: trajectories, their parts and prompts, and how loaded a replica is. Times are seconds
since the Unix epoch."""

import msgspec

TOKEN_BYTES = 4  # of a token as well as of a log-prob


class Message(msgspec.Struct, tag=True, omit_defaults=True):
    """Base of everything that crosses between processes."""


class Sample(msgspec.Struct):
    """One trajectory to be generated. `ungraded`: times that its environment has failed before."""

    trajectory_id: int
    attempt: int
    ungraded: int = 0


class PromptGroup(msgspec.Struct):
    """A prompt and the trajectories that are to answer it."""

    group_id: int
    prompt_tokens: list[int]
    prompt: str
    row: dict
    samples: list[Sample]


class VersionSpan(msgspec.Struct):
    """Tokens [start, end) of a response came from weights `weight_id`, by the engine's own report."""

    weight_id: int
    start: int
    end: int


class Partial(msgspec.Struct):
    """A response so far: what a replica needs to go on with it. `tokens` are int32 and `logprobs` float32,
    little-endian, one of each per token; moves that it has made. Tokens in no span were given by the
    environment: they are not trained, and their log-prob is 0. `called`: the calls of its last turn may have
    been made, and their results are not here. `awaits`: then the name of the Answer that will bring them
    from the replica where they are made, "" = none will. `home`: the name of its environment, which stays
    with the replica that made it (line/messages/homes.py), "" = it has none that stays. `routes`: with
    algorithm.routing_replay the experts of the first tokens of prompt and response (rollout/routes.py).
    `parked`: the name of its KV cache at a relay (line/messages/parking.py), "" = none is kept."""

    tokens: bytes = b""
    logprobs: bytes = b""
    spans: list[VersionSpan] = []
    time_started: float = 0.0
    moves: int = 0
    called: bool = False
    awaits: str = ""
    home: str = ""
    routes: bytes = b""
    parked: str = ""

    @property
    def count(self) -> int:
        """How many tokens it has."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def trained(self) -> int:
        """How many of them the policy has drawn."""
        return sum(span.end - span.start for span in self.spans)

    @property
    def weight_ids(self) -> set[int]:
        """That drew its tokens."""
        return {span.weight_id for span in self.spans}


class ResponsePlace(msgspec.Struct, frozen=True):
    """Where a response lies (store/payload/layout.py): `size` bytes from `offset` in a file of payloads/."""

    file: str
    offset: int
    size: int


class Trajectory(msgspec.Struct, omit_defaults=True):
    """What is known of a complete response beside its columns, and with the fields of ScorePart of a scored
    one. Its tokens and log-probs are at `place`; `digest` is theirs. One of an evaluation has no place."""

    trajectory_id: int
    group_id: int
    attempt: int
    replica: int
    weight_id: int
    weight_step: int
    length: int  # response tokens
    trained: int  # of them, those whose loss mask is 1: drawn by the policy, not given by the environment
    policies: int  # weight ids that drew its tokens, by the engine's own report
    finish_reason: str  # stop | length, or the limit that ended it: turns | calls | time
    time_started: float
    time_finished: float
    step_finished: int = -1  # trainer step when the last token was generated, stamped by the controller
    time_scored: float = 0.0
    reward: float = 0.0
    reward_parts: dict[str, float] = {}
    reward_error: str = ""
    turns: int = 1
    moves: int = 0
    digest: str = ""
    place: ResponsePlace | None = None


class ScorePart(msgspec.Struct, omit_defaults=True):
    """What the score of a response adds to its Trajectory."""

    time_scored: float
    reward: float
    reward_parts: dict[str, float] = {}
    reward_error: str = ""


class ReplicaLoad(msgspec.Struct, omit_defaults=True):
    """What a replica does, as last heard. The engine's own numbers are at most a second old."""

    phase: str  # of rollout/state.py
    weight_id: int | None  # None = no verified weights yet
    in_flight: int  # trajectories of the local batch without their last token
    scoring: int  # trajectories whose reward is being computed
    running: int = 0  # requests that the engine decodes
    queued: int = 0  # requests that wait in the engine
    kv_tokens: int = 0  # of the KV cache in use
    kv_capacity: int = 0  # 0 = the engine has not said yet
    tokens_per_second: float = 0.0  # response tokens of the trajectories that ended in the last half minute
    # (requests, seconds per decode step) of policies/repack.py, ascending; [] = not measured
    decode_curve: list[tuple[int, float]] = msgspec.field(default_factory=list)
    waiting: int = 0  # trajectories in flight that wait for a tool
    waiting_tokens: int = 0  # of their prompts and responses so far
    held: list[int] = msgspec.field(default_factory=list)  # refresh=versions: all ids that it generates with

    @property
    def held_tokens(self) -> int:
        """KV tokens of all that it generates: what waits for a tool has them in the prefix cache, or will."""
        return self.kv_tokens + self.waiting_tokens
