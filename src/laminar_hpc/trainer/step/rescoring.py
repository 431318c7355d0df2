"""Log-probs of a step's whole batch by other weights than those that generated it. Called by
trainer/step/learner.py before the updates."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from laminar_hpc.messages.data import Trajectory
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.microbatch import length, trained, trajectory_pack
from laminar_hpc.trainer.step.parallel import own_microbatches, reduced


class ReferenceWeights:
    """A frozen copy of the weights that `policy` has now. The learner makes it before a checkpoint is loaded,
    so that it holds those of config.model.path in every launch of a run; checkpoints need not hold it."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self._live = list(policy.gpt.parameters())
        self._frozen = [p.detach().clone() for p in self._live]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy's forward passes use the copy inside. The live weights stay where they are in memory,
        untouched, so that a publication may go on reading them."""
        live = [p.data for p in self._live]
        for parameter, frozen in zip(self._live, self._frozen, strict=True):
            parameter.data = frozen
        try:
            yield
        finally:
            for parameter, data in zip(self._live, live, strict=True):
                parameter.data = data


def batch_logprobs(policy: MegatronPolicy, trajectories: list[Trajectory]) -> torch.Tensor:
    """By the weights in place, at the sampling temperature: float32 [trained tokens] on the CPU, trajectory
    after trajectory, the whole batch on every rank. Collective; each data-parallel rank computes its
    share."""
    lengths, budget = [length(t) for t in trajectories], policy.config.trainer.tokens_per_microbatch
    plan, size = own_microbatches(lengths, budget)
    counts = [len(trained(t)) for t in trajectories]
    logprobs = [torch.zeros(n, device=policy.device) for n in counts]
    scored = policy.score(
        [trajectory_pack([trajectories[i] for i in part], policy.device, size) for part in plan]
    )
    for part, of_pack in zip(plan, scored, strict=False):  # another stage has none
        if part:
            for i, own in zip(part, of_pack.split([counts[i] for i in part]), strict=True):
                logprobs[i] = own
    return reduced(torch.cat(logprobs)).cpu()
