"""What replicas report to the controller, made up."""

from laminar_hpc.messages.data import PromptGroup, Sample, Trajectory, VersionSpan
from laminar_hpc.messages.digest import sealed


def trajectory(group: PromptGroup, sample: Sample, weight_id: int = 0, step: int = 0) -> Trajectory:
    """A complete response of three tokens by replica 0, under one policy."""
    made = Trajectory(
        trajectory_id=sample.trajectory_id,
        group_id=group.group_id,
        attempt=sample.attempt,
        replica=0,
        weight_id=weight_id,
        weight_step=step,
        prompt_tokens=group.prompt_tokens,
        response_tokens=[1, 2, 3],
        logprobs=[-0.1, -0.2, -0.3],
        loss_mask=[1, 1, 1],
        finish_reason="stop",
        version_spans=[VersionSpan(weight_id, 0, 3)],
        time_started=1.0,
        time_finished=2.0,
    )
    return sealed(made)
