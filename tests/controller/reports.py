"""What replicas report to the controller, made up."""

from pathlib import Path

from laminar_hpc.messages.data import Place, PromptGroup, Sample, Trajectory
from made import Made, stored


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
    return stored(run_dir, made) if run_dir else made.record(Place("rollout0_00000000.0000", 0, 100))
