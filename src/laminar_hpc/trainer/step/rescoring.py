"""Log-probs of a step's batch by other weights than those that generated it. Called by
trainer/step/learner.py before the updates."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from laminar_hpc.trainer.megatron.optimizer_shards import sharded_weights
from laminar_hpc.trainer.megatron.packs import Pack
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.microbatch import Lazily, Text, text_pack
from laminar_hpc.trainer.step.parallel import RankShare


class Beside(Protocol):
    """What a checkpoint holds beside the policy."""

    def sharded(self, loading: bool) -> dict:
        """For `dist_checkpointing.save` and `load`; collective."""

    def take(self, loaded: dict) -> None:
        """What `dist_checkpointing.load` made of `sharded`; collective."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it, by name, for a hash."""


class ReferenceWeights:
    """A frozen copy of the trained weights that `policy` has now. The learner makes it before a checkpoint is
    loaded, so that it holds those of config.model.path in every launch of a run; checkpoints hold it only
    where it moves (algorithm.reference_every). Of an adapter it is 0, which is the model without one."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self._gpt = policy.gpt
        self._names = [name for name, p in policy.gpt.named_parameters() if p.requires_grad]
        self._live = [p for p in policy.gpt.parameters() if p.requires_grad]
        adapter = policy.config.model.lora.rank > 0
        self._frozen = [torch.zeros_like(p) if adapter else p.detach().clone() for p in self._live]

    @classmethod
    def of_directory(cls, policy: MegatronPolicy, directory: str) -> "ReferenceWeights":
        """A copy of a Hugging Face directory's weights; the policy has those of config.model.path before and
        afterwards. Raises LaminarError where they are not of the policy's shape."""
        policy.load_hf(Path(directory))
        read = cls(policy)
        policy.load_hf(Path(policy.config.model.path))
        return read

    def move(self) -> None:
        """Takes the weights that the policy has now."""
        for parameter, frozen in zip(self._live, self._frozen, strict=True):
            frozen.copy_(parameter.detach())

    def sharded(self, loading: bool = False) -> dict[str, ShardedTensor]:
        """See Beside."""
        with self.in_place():
            return sharded_weights(self._gpt, "reference.")

    def take(self, loaded: dict[str, torch.Tensor]) -> None:
        """See Beside."""
        for name, own in self.sharded().items():
            own.data.copy_(loaded[name].view_as(own.data))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The copy by the names of the parameters."""
        return dict(zip(self._names, self._frozen, strict=True))

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


def own_logprobs(
    policy: MegatronPolicy, texts: Mapping[int, Text], shares: list[RankShare], progress: Callable[[], None]
) -> dict[int, Tensor]:
    """By the weights in place, at the sampling temperature, of this rank's texts: float32 [trained tokens] of
    each on the CPU; zeros on a pipeline stage that has none. In the micro-batches in which they are trained;
    `progress` is called between them. Collective."""
    zeros = {i: torch.zeros(text.response.trained) for i, text in texts.items()}
    return zeros | _of_texts(policy.score, policy.device, texts, shares, progress)


def own_states(
    policy: MegatronPolicy, texts: Mapping[int, Text], shares: list[RankShare], progress: Callable[[], None]
) -> dict[int, Tensor]:
    """As `own_logprobs`, what the head makes logits of: [trained tokens, hidden] of each; none on another
    pipeline stage than the last."""
    return _of_texts(policy.hidden_states, policy.device, texts, shares, progress)


def _of_texts(
    read: Callable[[Sequence[Pack]], list[Tensor]],
    device: torch.device,
    texts: Mapping[int, Text],
    shares: list[RankShare],
    progress: Callable[[], None],
) -> dict[int, Tensor]:
    """What is read of each text's trained tokens, on the CPU."""
    plan = [part for share in shares for part in share.plan]
    size = max(share.size for share in shares)  # pipeline stages pass on tensors of one shape
    found = dict[int, Tensor]()

    def pack(number: int) -> Pack:
        if number:
            progress()
        return text_pack([texts[i] for i in plan[number]], device, size)

    for part, of_pack in zip(plan, read(Lazily(len(plan), pack)), strict=False):  # another stage has none
        if part:
            own = of_pack.cpu().split([texts[i].response.trained for i in part])
            found |= dict(zip(part, own, strict=True))
    return found
