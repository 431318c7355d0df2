"""What messages carry: trajectories, their parts and prompts, and how loaded a replica is. Times are seconds
since the Unix epoch."""

import msgspec


class Message(msgspec.Struct, tag=True, omit_defaults=True):
    """Base of everything that crosses between processes."""


class Sample(msgspec.Struct):
    """One trajectory to be generated."""

    trajectory_id: int
    attempt: int


class PromptGroup(msgspec.Struct):
    """A prompt and the trajectories that are to answer it."""

    group_id: int
    prompt_tokens: list[int]
    prompt: str
    row: dict
    samples: list[Sample]


class VersionSpan(msgspec.Struct):
    """Tokens [start, end) of a response were generated with weights `weight_id`, by the engine's own
    report."""

    weight_id: int
    start: int
    end: int


class Partial(msgspec.Struct):
    """A response so far: what a replica needs to go on with it. Tokens and their log-probs, one each; moves
    that it has made."""

    tokens: list[int] = []
    logprobs: list[float] = []
    spans: list[VersionSpan] = []
    time_started: float = 0.0
    moves: int = 0


class Trajectory(msgspec.Struct, omit_defaults=True):
    """A generated response, and with the fields of ScorePart a scored one, as trained on.

    `logprobs` are the engine's behaviour log-probs, one per response token. `digest`: see messages/digest.py.
    """

    trajectory_id: int
    group_id: int
    attempt: int
    replica: int
    weight_id: int
    weight_step: int
    prompt_tokens: list[int]
    response_tokens: list[int]
    logprobs: list[float]
    loss_mask: list[int]  # one per response token; 0 = given by the environment, not by the policy
    finish_reason: str  # stop | length
    version_spans: list[VersionSpan]
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


class ScorePart(msgspec.Struct, omit_defaults=True):
    """What the score of a response adds to its Trajectory; stored apart, so that the response is written
    once."""

    time_scored: float
    reward: float
    reward_parts: dict[str, float] = {}
    reward_error: str = ""


class ReplicaLoad(msgspec.Struct, omit_defaults=True):
    """What a replica is doing, as seen when it was last heard. The engine's own numbers are at most a second
    old."""

    phase: str  # of rollout/state.py
    weight_id: int | None  # None = no verified weights yet
    in_flight: int  # trajectories of the local batch without their last token
    scoring: int  # trajectories whose reward is being computed
    running: int = 0  # requests that the engine decodes
    queued: int = 0  # requests that wait in the engine
    kv_tokens: int = 0  # of the KV cache in use
    kv_capacity: int = 0  # 0 = the engine has not said yet
    tokens_per_second: float = 0.0  # response tokens of the trajectories that ended in the last half minute
    # requests at which decode stops being memory-bound (B of policies/repack.py); None = not measured
    batch_max: int | None = None
