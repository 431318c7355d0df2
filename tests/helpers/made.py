"""Responses made up by tests, as lists: their columns, their records, and payload files that hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from laminar_hpc.line.messages.data import PromptGroup, ResponsePlace, Sample, Trajectory, VersionSpan
from laminar_hpc.line.messages.training import BatchGroup
from laminar_hpc.store.payload.layout import Response, logprobs_array, pack, packed_digest, tokens_array
from laminar_hpc.store.payload.whole import Whole
from laminar_hpc.store.payload.writer import PayloadWriter


@dataclass
class Made:
    """One trajectory; fields as in messages.Trajectory, and its columns as lists."""

    trajectory_id: int
    group_id: int
    prompt_tokens: list[int]
    response_tokens: list[int]
    logprobs: list[float]
    loss_mask: list[int] | None = None  # None: all are trained
    version_spans: list[VersionSpan] = field(default_factory=list)  # none: one of `weight_id`
    attempt: int = 0
    replica: int = 0
    weight_id: int = 0
    weight_step: int = 0
    finish_reason: str = "stop"
    time_started: float = 1.0
    time_finished: float = 2.0
    step_finished: int = -1
    time_scored: float = 0.0
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_error: str = ""
    moves: int = 0

    @property
    def mask(self) -> list[int]:
        return [1] * len(self.response_tokens) if self.loss_mask is None else self.loss_mask

    @property
    def response(self) -> Response:
        spans = self.version_spans or [VersionSpan(self.weight_id, 0, len(self.response_tokens))]
        columns = tokens_array(self.response_tokens), logprobs_array(self.logprobs)
        return Response(self.trajectory_id, self.attempt, *columns, spans, runs(self.mask))

    def record(self, place: ResponsePlace | None = None) -> Trajectory:
        """What is said of it."""
        response, columns = self.response, ("prompt_tokens", "response_tokens", "logprobs", "loss_mask")
        fields = {
            name: value for name, value in vars(self).items() if name not in (*columns, "version_spans")
        }
        return Trajectory(
            length=len(response.tokens),
            trained=response.trained,
            policies=len({span.weight_id for span in response.spans}),
            digest=packed_digest(pack(response)),
            place=place,
            **fields,
        )

    @property
    def whole(self) -> Whole:
        return Whole(self.record(), tokens_array(self.prompt_tokens), self.response)


def runs(mask: Sequence[int]) -> np.ndarray:
    """The runs of a loss mask."""
    lengths, trained = [0], True
    for one in mask:
        if bool(one) != trained:
            lengths.append(0)
            trained = not trained
        lengths[-1] += 1
    return np.array(lengths, np.uint32)


_writers: dict[Path, PayloadWriter] = {}  # each with its thread, to the end of the process


def groups(
    run_dir: Path, batch: Sequence[Made], routes: Mapping[int, bytes] | None = None
) -> list[BatchGroup]:
    """The batch as the controller sends it, its responses in a payload file of `run_dir`, with packed routes
    behind them by trajectory."""
    writer = _writers.setdefault(run_dir, PayloadWriter(run_dir, "rollout0"))
    behind = routes or {}
    written = [
        (made, writer.append(pack(made.response), behind.get(made.trajectory_id, b""))) for made in batch
    ]
    found: dict[int, BatchGroup] = {}
    for made, place in written:
        prompt = tokens_array(made.prompt_tokens).tobytes()
        group = found.setdefault(made.group_id, BatchGroup(made.group_id, prompt, []))
        group.trajectories.append(made.record(place.result(10.0)))
    return list(found.values())


def stored(run_dir: Path, made: Made) -> Trajectory:
    """Its record, as its replica reports it once its response is in a payload file of `run_dir`."""
    [group] = groups(run_dir, [made])
    return group.trajectories[0]


def response(group: PromptGroup, sample: Sample, weight_id: int = 0, step: int = 0) -> Made:
    """Three tokens by replica 0, under one policy."""
    whose = sample.trajectory_id, group.group_id, group.prompt_tokens
    made = Made(*whose, [1, 2, 3], [-0.1, -0.2, -0.3], attempt=sample.attempt)
    made.weight_id, made.weight_step = weight_id, step
    return made


def trajectory(
    group: PromptGroup, sample: Sample, weight_id: int = 0, step: int = 0, run_dir: Path | None = None
) -> Trajectory:
    """The report of such a response; with `run_dir` it is in a payload file there."""
    made = response(group, sample, weight_id, step)
    return stored(run_dir, made) if run_dir else made.record(ResponsePlace("rollout0_00000000.0000", 0, 100))
