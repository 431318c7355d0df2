"""Norms behind attention and behind the feed-forward part, before what they give is added to the residual
(GLM-4): Megatron's layers have none there. Called by trainer/megatron/building.py."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from laminar_hpc.trainer.megatron.residual import Norm
from laminar_hpc.weights.hf import ModelShape


def add_post_norms(gpt: GPTModel, shape: ModelShape) -> None:
    """To each layer of a model just built, in place, where its family has them. Parameters of the layer; with
    sequence parallelism a norm sees this rank's share of the tokens, as Megatron's own do."""
    places = {place for _, place in shape.family.norms}
    for layer in gpt.decoder.layers:
        for place, part in (("after_attention", layer.self_attention), ("after_mlp", layer.mlp)):
            if place in places:
                norm = Norm(gpt.config, shape.hidden, shape.norm_eps)
                layer.add_module(f"norm_{place}", norm)
                part.register_forward_hook(_NormsOutput(norm))


class _NormsOutput:
    """A forward hook: a part's output without a bias [tokens, 1, hidden] -> the norm of it."""

    def __init__(self, norm: torch.nn.Module) -> None:
        self._norm = norm

    def __call__(self, part: torch.nn.Module, inputs: Any, result: tuple) -> tuple:
        output, bias = result
        if bias is not None:
            raise ValueError("a norm behind a layer's part knows no bias of it")
        return self._norm(output), None
