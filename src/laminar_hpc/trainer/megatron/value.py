"""The critic's model: the policy's decoder with one number per place in place of logits, and an optimizer of
its own. Built, run and stepped as the policy is, at its layout."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.trainer.megatron.building import build_chunks
from laminar_hpc.trainer.megatron.loading import load_own, own_slices
from laminar_hpc.trainer.megatron.packs import Pack
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.weights.hf import TensorReader
from laminar_hpc.weights.kernels.slices import LocalSlice

HEAD = "score.weight"  # as transformers names that of a sequence classifier, a reward model for example
_PARAMETER = "output_layer.weight"


class ValueHead(torch.nn.Module):
    """[places, 1, hidden] -> values [places, 1, 1] float32. Each tensor-parallel rank has all of it, and all
    places, so that its gradient needs no sum."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden, dtype=dtype))
        self.weight.tensor_model_parallel = False
        self.weight.sequence_parallel = False

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Takes what Megatron gives to an output layer beside the hidden states, and needs none of it."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float()), None


class ValueModel(MegatronPolicy):
    """`config.model.path` and `config.optimizer` are the critic's. What a MegatronPolicy says of log-probs is
    said of values here; it is not published."""

    def _build_chunks(self) -> list[GPTModel]:
        chunks = build_chunks(self.transformer, replace(self.shape, tied=False), self.config)
        if chunks[-1].post_process:
            chunks[-1].output_layer = ValueHead(self.shape.hidden, self.dtype)
        return chunks

    def _take_head(self) -> None:
        self._head = SimpleNamespace(hands_on=False)

    def _slices_of(self, chunks: Sequence[GPTModel]) -> list[LocalSlice]:
        return own_slices(chunks, self.shape, without=_PARAMETER)

    def _join(self, local: list[LocalSlice]) -> None:
        """Nobody takes its weights together."""

    def _in_chunks(self, pack: Pack) -> bool:
        return False

    def _own_logprobs(self, output: torch.Tensor, pack: Pack, temperature: float) -> tuple[torch.Tensor, ...]:
        values = output.reshape(-1).float()
        return values, values.detach()

    @torch.no_grad()
    def _load_model(self, chunks: Sequence[GPTModel], local: list[LocalSlice]) -> None:
        directory = Path(self.config.model.path)
        for parameter in self.gpt.parameters():
            parameter.zero_()
        with TensorReader(directory) as tensors:
            if lacking := [each.name for each in local if each.name not in tensors.names()]:
                raise LaminarError(
                    f"critic.path={directory} has no {lacking[0]}: name a directory of the policy's shape"
                )
            load_own(tensors, local, directory)
            if HEAD in tensors.names() and self._last.post_process:
                weight = tensors.narrow(HEAD, 0, 0, 1)
                if tensors.shape(HEAD) != (1, self.shape.hidden):
                    raise LaminarError(
                        f"critic.path={directory}: {HEAD} is {tensors.shape(HEAD)}, and a value is one "
                        "number; name a model with one score, or one without"
                    )
                self._last.output_layer.weight.copy_(weight)
