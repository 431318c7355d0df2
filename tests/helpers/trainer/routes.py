"""Routes of made-up responses, transformers with routes forced upon it, and what a rank of a trainer world
does with them, which is called by name through ranks.py."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from helpers.made import Made
from helpers.trainer import tiny
from helpers.trainer.cases import weights_of
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import model_config
from laminar_hpc.config.routing import RouteShape, route_shape
from laminar_hpc.store.payload.layout import Routes
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.batch import StepBatch, in_memory
from laminar_hpc.trainer.step.learner import Learner


def tokens_of(made: Made) -> list[int]:
    return made.prompt_tokens + made.response_tokens


def shape_of(model: Path) -> RouteShape:
    shape = route_shape(model_config(str(model)))
    assert shape is not None
    return shape


def drawn_routes(shape: RouteShape, tokens: int, seed: int) -> Routes:
    """Any experts, in any order: what a router would choose seldom."""
    noise = np.random.default_rng(seed).random((tokens - 1, len(shape.layers), shape.experts))
    return np.argsort(noise, -1)[..., : shape.per_token].astype(shape.dtype)


def drawn_for(shape: RouteShape, batch: list[Made]) -> dict[int, Routes]:
    """By trajectory."""
    return {t.trajectory_id: drawn_routes(shape, len(tokens_of(t)), t.trajectory_id) for t in batch}


def routed_batch(batch: list[Made], routes: dict[int, Routes]) -> StepBatch:
    """As the Learner takes it, with these routes by trajectory; a trajectory without has none."""
    wholes = [t.whole for t in batch]
    return in_memory(
        [
            replace(w, response=replace(w.response, routed_experts=routes.get(w.record.trajectory_id)))
            for w in wholes
        ]
    )


class Forced:
    """transformers' model that sends each token of a known sequence to the experts it is told; the weights of
    these are what its own router gives them."""

    def __init__(self, model: torch.nn.Module, known: dict[tuple[int, ...], Routes]) -> None:
        self.model = model
        self._known = known
        self._now: Routes | None = None
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.forward = self._gate(layer.mlp.gate, number)

    def __call__(self, tokens: torch.Tensor) -> object:
        """tokens [1, n]; the last one, which has no route, goes where its own router sends it."""
        self._now = self._known[tuple(tokens[0].tolist())]
        return self.model(tokens)

    def _gate(self, gate: torch.nn.Module, layer: int) -> Callable:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            scores = logits.softmax(-1)
            chosen = scores.topk(gate.top_k, -1).indices
            assert self._now is not None
            chosen[:-1] = torch.from_numpy(self._now[:, layer].astype(np.int64))
            weights = scores.gather(1, chosen)
            if getattr(gate, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, chosen

        return forward


@torch.no_grad()
def free_routes(model: torch.nn.Module, tokens: list[int]) -> Routes:
    """What transformers' own routers choose, the heaviest first."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda gate, inputs, outputs: found.append(outputs[2]))
        for layer in model.model.layers
    ]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)[:-1].numpy().astype(np.uint8)


def train(model: str, settings: dict, count: int) -> dict[str, object]:
    """So many steps with drawn routes: metrics, and on rank 0 the weights."""
    path = Path(model)
    policy = MegatronPolicy(tiny.make_config(path, algorithm__routing_replay="true", **settings))
    learner, metrics = Learner(policy.config, policy), []
    for step in range(count):
        batch = tiny.make_batch(seed=100 + step)
        batch = routed_batch(batch, drawn_for(shape_of(path), batch))
        metrics.append(learner.train(batch, step, lambda: None))
    weights = weights_of(policy)
    dist.barrier()  # a rank that ended now would take along what it has sent
    return {"metrics": metrics, "weights": weights}


def train_without_one(model: str, settings: dict, missing: int) -> str:
    """What is said of a batch in which one trajectory has no routes."""
    path = Path(model)
    policy = MegatronPolicy(tiny.make_config(path, algorithm__routing_replay="true", **settings))
    batch = tiny.make_batch(seed=1)
    routes = drawn_for(shape_of(path), batch)
    del routes[missing]
    try:
        Learner(policy.config, policy).train(routed_batch(batch, routes), 0, lambda: None)
    except LaminarError as error:
        return str(error)
    return ""
