"""Routing replay (R3, Ma et al., arXiv 2510.11370): the trainer sends each token to the experts that the
engine sent it to, so that both compute the same function. What it means for a configuration. Imports no
torch.

A route is one row of numbers: for each layer with a router, the experts of one token, in the engine's order.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from laminar_hpc.config.bounds import shown
from laminar_hpc.config.experts import Experts, experts_of
from laminar_hpc.config.schema import RunConfig

_BYTE_EXPERTS = 256  # experts whose numbers fit into a byte


@dataclass(frozen=True)
class RouteShape:
    """What one token's route is: `layers` are the numbers of those with a router, in the model's order."""

    layers: tuple[int, ...]
    per_token: int
    experts: int

    @property
    def dtype(self) -> str:
        """As numpy names it."""
        return "uint8" if self.experts <= _BYTE_EXPERTS else "int16"

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's route."""
        return len(self.layers) * self.per_token * (1 if self.dtype == "uint8" else 2)


def route_shape(model: dict) -> RouteShape | None:
    """Of a config.json; None for a dense model."""
    experts = experts_of(model)
    if experts is None:
        return None
    return RouteShape(tuple(range(model["num_hidden_layers"])), experts.per_token, experts.count)


def replayed_routes(config: RunConfig, model: dict) -> RouteShape | None:
    """What responses carry; None where the run replays no routes. auto: those of experts in bfloat16 that a
    real engine serves."""
    asked = shown(config.algorithm.routing_replay)
    own = config.rollout.engine != "emulated" and not config.source.startswith("replay:")
    if asked == "true" or (asked == "auto" and own and config.model.dtype == "bfloat16"):
        return route_shape(model)
    return None


def wrong_replay(config: RunConfig, experts: Experts | None) -> Iterator[str]:
    """Yields what is wrong with algorithm.routing_replay=true, with `@KEY` for KEY=VALUE."""
    if shown(config.algorithm.routing_replay) != "true":
        return
    if experts is None:
        yield "algorithm.routing_replay=true: the model has no experts; leave it at auto"
    if config.source.startswith("replay:"):
        yield "algorithm.routing_replay=true: the archive of @source has no routes; leave it at auto"
