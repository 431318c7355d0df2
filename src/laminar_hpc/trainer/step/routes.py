"""The experts that the engine chose for a step's texts, checked before any of them is replayed. Called by
trainer/step/learner.py."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.routing import RouteShape
from laminar_hpc.store.payload.layout import Routes
from laminar_hpc.trainer.control import all_frames
from laminar_hpc.trainer.step.microbatch import Text, branch_routes


def routed(
    texts: Mapping[int, Text], shape: RouteShape, layers: Sequence[int], seconds: float
) -> dict[int, Text]:
    """The texts with their routes through `layers`, which are places in `shape.layers`. Collective over the
    trainer world: raises LaminarError on all ranks for a text whose routes are missing or wrong, and after
    `seconds` without one of the ranks."""
    found, wrong = dict[int, Text](), ""
    try:
        found = {i: _routed(text, shape, layers) for i, text in texts.items()}
    except LaminarError as error:
        wrong = str(error)
    if heard := [frame for frame in all_frames(wrong.encode(), seconds, "the routes of a batch") if frame]:
        raise LaminarError(heard[0].decode())
    return found


def _routed(text: Text, shape: RouteShape, layers: Sequence[int]) -> Text:
    routes = text.response.routed_experts
    wanted = (len(text.prompt) + len(text.response.tokens) - 1, len(shape.layers), shape.per_token)
    if routes is None:
        wrong = "came without the experts that the engine sent its tokens to"
    elif routes.shape != wanted or routes.dtype.kind not in "iu":
        wrong = f"has routes {routes.dtype}{list(routes.shape)}, and not {shape.dtype}{list(wanted)}"
    else:
        of_rank = replace(text, routes=routes[:, _at_once(layers)])
        wrong = next(filter(None, (_objection(part, shape) for part in branch_routes(of_rank))), "")
        if not wrong:
            return of_rank
    raise LaminarError(
        f"trajectory {text.response.trajectory_id} {wrong}, so they cannot be replayed; look at the log of "
        "its rollout, or set algorithm.routing_replay=false"
    )


def _at_once(layers: Sequence[int]) -> slice | list[int]:
    """As an index: a slice, which copies nothing, unless virtual stages have other layers between them."""
    follow = layers and layers[-1] - layers[0] == len(layers) - 1
    return slice(layers[0], layers[-1] + 1) if follow else list(layers)


def _objection(routes: Routes, shape: RouteShape) -> str:
    """What is wrong with the routes of a sequence's inputs; "" if nothing is."""
    chosen = np.ascontiguousarray(routes.reshape(-1, shape.per_token).T)
    low, high = int(chosen.min(initial=0)), int(chosen.max(initial=0))
    if low < 0 or high >= shape.experts:
        return f"has expert {low if low < 0 else high} of {shape.experts} in a route"
    if any((chosen[i] == chosen[j]).any() for i in range(len(chosen)) for j in range(i)):
        return "has an expert twice in the route of a token"
    return ""
