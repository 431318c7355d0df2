"""Routing replay: each token of a pack goes to the experts that the engine sent it to, where the trainer's
own router, whose inputs differ by a rounding, might choose others (R3, Ma et al., arXiv 2510.11370). Called
by trainer/megatron/policy.py and packs.py.

Only the choice is the engine's. The weights of the chosen experts come from the trainer's own logits of all
experts, so the router has its gradient.

Routes travel with their pack through the model. So a layer has those of its own micro-batch whatever the
schedule, also when full recomputation runs the whole layer again. Selective recomputation runs a layer's
experts alone: it takes their routes from Megatron's queue, as backward passes come in the order of the
forward passes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_layer import TransformerLayer

from laminar_hpc.config.routing import RouteShape
from laminar_hpc.store.payload.layout import Routes
from laminar_hpc.trainer.megatron.attention import PackLayout


class LayerReplay(RouterReplay):
    """Megatron's (0.16.1, transformer/moe/router_replay.py), of one layer, for routes that are shorter than
    the pack: the tokens that fill it up are routed freely. Routes are [tokens, experts per token] of any
    integer dtype. `seen` [2] int64 counts the tokens that were routed with gradients, and those of them that
    the layer's own router would have sent to other experts."""

    def __init__(self, seen: torch.Tensor) -> None:
        super().__init__()
        RouterReplay.global_router_replay_instances.remove(self)  # which would keep it for ever
        self._seen = seen

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """scores [tokens, experts] -> those of the chosen, and which they are: each [tokens, topk]."""
        assert default_compute_topk is not None
        with torch.no_grad():
            _, free = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        again = self.router_replay_action is RouterReplayAction.REPLAY_BACKWARD
        routes = (self.replay_backward_list[0] if again else self.target_topk_idx).long()
        if torch.is_grad_enabled():  # once for each micro-batch, computed again or not
            self._count(routes, free[: len(routes)])
        chosen = torch.cat((routes, free[len(routes) :]))
        if again:
            self.replay_backward_list[0] = chosen
        else:
            self.target_topk_idx = chosen
        found: tuple[torch.Tensor, torch.Tensor] = super().get_replay_topk(scores, topk)
        return found

    def _count(self, routes: torch.Tensor, free: torch.Tensor) -> None:
        differ = (routes.sort(-1).values != free.sort(-1).values).any(-1)
        self._seen += torch.stack((torch.ones_like(differ).sum(), differ.sum()))


class RoutingReplay:
    """Replay in all layers with experts of this rank's chunks. `shape`: of a token's route through the whole
    model; `layers`: places in `shape.layers` of these layers, in their order."""

    def __init__(self, shape: RouteShape, chunks: Sequence[GPTModel], device: torch.device) -> None:
        self.shape = shape
        self.layers: list[int] = []
        self._seen = torch.zeros(2, dtype=torch.long, device=device)
        self._replays: list[LayerReplay] = []
        for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
            if layer.layer_number - 1 in shape.layers:
                self._attach(layer)
                self.layers.append(shape.layers.index(layer.layer_number - 1))

    def _attach(self, layer: TransformerLayer) -> None:
        replay, own = LayerReplay(self._seen), len(self._replays)
        layer.mlp.router.router_replay = replay
        self._replays.append(replay)
        none = torch.zeros(0, layer.mlp.router.topk, dtype=torch.long, device=self._seen.device)

        def begin(layer: TransformerLayer, inputs: tuple, named: dict[str, Any]) -> None:
            layout: PackLayout = named["packed_seq_params"]
            chosen = none if layout.routes is None else layout.routes[:, own]
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            if layer.mlp.moe_layer_recompute and torch.is_grad_enabled():
                replay.set_target_indices(chosen)
            else:
                replay.target_topk_idx = chosen

        def end(layer: TransformerLayer, inputs: tuple, output: object) -> None:
            replay.target_topk_idx = None
            replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

        layer.register_forward_pre_hook(begin, with_kwargs=True)
        layer.register_forward_hook(end)

    def check_consumed(self) -> None:
        """To be called when all backward passes are through. Raises RuntimeError where routes are left over:
        then some micro-batch was not computed again with its own."""
        left = [len(replay.replay_backward_list) for replay in self._replays]
        if any(left):
            raise RuntimeError(f"routes are left over after the backward passes, in each layer: {left}")

    def difference(self) -> float:
        """Of all pairs of a token and a layer since the last call, the share in which the layer's own router
        would have chosen other experts. Collective: each rank has other pairs."""
        dist.all_reduce(self._seen)
        chosen, others = self._seen.tolist()
        self._seen.zero_()
        return others / max(1, chosen)


def routes_of_rank(routes: Sequence[Routes], tokens: slice, tensor_ranks: int) -> Routes:
    """Of the pack's sequences, one after the other, the part that this rank routes: with sequence parallelism
    its share of `tokens`, which are its context-parallel rank's. Shorter where the pack is filled up."""
    size = (tokens.stop - tokens.start) // tensor_ranks
    rank = parallel_state.get_tensor_model_parallel_rank() if tensor_ranks > 1 else 0
    start = tokens.start + rank * size
    return np.concatenate(routes)[start : start + size]
