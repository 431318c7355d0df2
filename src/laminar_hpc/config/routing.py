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
_COLUMN_BYTES = 8  # of a token and its log-prob in a payload file
_ENGINE_BYTES = 4  # of an expert's number in the engine's host memory
_MANY_BYTES = 8e9  # of routes in a step, which the file system of run_dir takes and gives


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

    @property
    def share(self) -> float:
        """Of the bytes of a response in its payload file, those of its routes; the prompt's left out."""
        return self.token_bytes / (self.token_bytes + _COLUMN_BYTES)


def route_shape(model: dict) -> RouteShape | None:
    """Of a config.json; None for a dense model."""
    experts = experts_of(model)
    if experts is None:
        return None
    return RouteShape(tuple(range(model["num_hidden_layers"])), experts.per_token, experts.count)


def replays(config: RunConfig) -> bool:
    """Whether routes are replayed if the model has experts. auto: in bfloat16, of a real engine's draws."""
    asked = shown(config.algorithm.routing_replay)
    own = config.rollout.engine != "emulated" and not config.source.startswith("replay:")
    return asked == "true" or (asked == "auto" and own and config.model.dtype == "bfloat16")


def replayed_routes(config: RunConfig, model: dict) -> RouteShape | None:
    """What responses carry; None where the run replays no routes."""
    return route_shape(model) if replays(config) else None


def replay_text(config: RunConfig, shape: RouteShape) -> str:
    """What a run's routes come to."""
    cache = config.rollout.kv_cache_tokens * len(shape.layers) * shape.per_token * _ENGINE_BYTES
    return (
        f"{len(shape.layers)} layers x {shape.per_token}: {shape.token_bytes} bytes a token, "
        f"{shape.share:.0%} of the data plane; {cache / 1e9:.2f} GB of an engine's host memory"
    )


def many_routes(config: RunConfig, shape: RouteShape, trajectories: int, mean_tokens: float) -> str:
    """A warning where the routes of a step are many, "" else. `trajectories`: of a step, each of prompt and
    response of so many tokens."""
    size = trajectories * mean_tokens * shape.token_bytes
    if size < _MANY_BYTES:
        return ""
    return (
        f"algorithm.routing_replay: about {size / 1e9:.0f} GB of routes in a step, {shape.token_bytes} bytes "
        f"of each token, cross the file system of run_dir={config.run_dir}; see that it is fast enough, or "
        "set algorithm.routing_replay=false"
    )


def wrong_replay(config: RunConfig, experts: Experts | None) -> Iterator[str]:
    """Yields what is wrong with algorithm.routing_replay=true, with `@KEY` for KEY=VALUE."""
    if shown(config.algorithm.routing_replay) != "true":
        return
    if experts is None:
        yield "algorithm.routing_replay=true: the model has no experts; leave it at auto"
    if config.source.startswith("replay:"):
        yield "algorithm.routing_replay=true: the archive of @source has no routes; leave it at auto"
