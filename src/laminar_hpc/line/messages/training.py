"""Trainers and the controller: batches, steps, checkpoints. Only rank 0 of the trainers' world speaks."""

import msgspec

from laminar_hpc.line.messages.data import Message, Sample, Trajectory


class TrainersMeet(Message):
    """Where the trainers' world meets: trainer 0's store, told to the others through the controller."""

    address: str
    port: int


class Restored(Message):
    """Where the trainers start, said once by every new trainer generation before its first TakeBatch: on the
    weights of the checkpoint of step `step`, None without one. The run goes back to that step.

    `passed_over`: a line on each newer checkpoint that is damaged.
    """

    step: int | None
    passed_over: list[str] = msgspec.field(default_factory=list)


class TakeBatch(Message):
    """Asks for the batch that turns weights of step `step` into `step + 1`, or with consumption as a stream
    for its next mini-batch. `unreadable`: responses of the batch that was sent for it before, none of which
    was trained; `why` the first of them cannot be read."""

    step: int
    part: int = 0
    unreadable: list[Sample] = msgspec.field(default_factory=list)
    why: str = ""


class BatchGroup(msgspec.Struct):
    """A prompt of a batch (`prompt_tokens`: int32, little-endian) and its scored trajectories. `teacher`: the
    name of its teacher, where there are several."""

    group_id: int
    prompt_tokens: bytes
    trajectories: list[Trajectory]
    teacher: str = ""


class Batch(Message):
    """Answer to the TakeBatch of the same step and part; the same one however often it is asked for. A plan:
    each rank reads the responses that it trains from their places in `run_dir`, "" for the run's own."""

    step: int
    groups: list[BatchGroup]
    samples_per_prompt: int
    run_dir: str
    part: int = 0


class NotYet(Message):
    """The batch is not there yet, and why; sent about once a second while the trainer waits."""

    step: int
    reason: str


class StepDone(Message):
    """Step `step` is in the weights (step + 1 is the version now). The answer is Continue or Leave; said
    again it is only answered.

    `mismatches`: trajectory id -> mean |log-prob by the trainer - by the engine| over its trained tokens when
    it was trained, and how many mini-batches the trainer's weights were ahead of the engine's then: with 0
    the two should agree, with more they have moved apart.
    `left_out`: trajectory id -> why the divergence guard has left it out; `skipped`: why it has skipped an
    update of the step, `diverged`: why it ends the run; or "".
    """

    step: int
    metrics: dict[str, float]
    mismatches: dict[int, tuple[float, int]] = msgspec.field(default_factory=dict)
    left_out: dict[int, str] = msgspec.field(default_factory=dict)
    skipped: str = ""
    diverged: str = ""


class Continue(Message):
    """Answer to StepDone of this step."""

    step: int


class Leave(Message):
    """Answer to TakeBatch or StepDone: checkpoint now, then say TrainerDone."""

    reason: str


class Checkpointed(Message):
    """The checkpoint of `step` is on the disk; it took `seconds`, training stood still for `stalled`."""

    step: int
    path: str
    seconds: float
    state_hash: str  # SHA-256 over weights, optimizer state and RNG; "" without checkpoint.state_hash
    stalled: float = 0.0


class TrainerDone(Message):
    """The last message of the trainers: the checkpoint of `step` is on the disk, and they leave."""

    step: int
