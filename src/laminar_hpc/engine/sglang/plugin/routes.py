"""The experts that tokens were sent to, in SGLang's schedulers: what a response carries of them, and what a
moved KV cache brings along. The hooks stand in hooks.py.

SGLang (state_capturer/) keeps a route, int32 [layers, experts per token], for each slot of its KV cache: that
of the forward pass that made the slot's KV. So a token whose KV is reused from the prefix cache has the route
that its KV was made with. SGLang knows none for KV that comes from elsewhere, and forgets those of a request
that it retracts; both are made up for here. Routes leave in the form of config/routing.py: layers with a
router only, in one or two bytes.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from laminar_hpc.config.routing import RouteShape, route_shape
from laminar_hpc.engine.kv.errors import KvRefused

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_KEPT = "laminar_routes"  # of a request that was retracted: int32 [tokens, layers, experts per token]


def _capturer() -> Any:
    """SGLang's routes by slot; None in an engine that returns none."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    return get_global_experts_capturer()


@cache
def _shape(model_config: Any) -> RouteShape:
    shape = route_shape(model_config.hf_config.to_dict())
    assert shape is not None, "only a mixture of experts is started with --enable-return-routed-experts"
    return shape


def number_layers(runner: Any) -> None:
    """Hook before ModelRunner.init_routed_experts_capturer: routers that do not know their layer get its
    number from their name."""
    from sglang.srt.layers.moe.topk import TopK

    for name, module in runner.model.named_modules():
        if isinstance(module, TopK) and module.layer_id is None and (found := _LAYER.search(name)):
            module.layer_id = int(found[1])


def keep_retracted(*, req: Any, req_to_token_pool: Any, **_: object) -> None:
    """Hook before release_req: the pages of a request that runs out of room are about to be freed. Its tokens
    are prefilled again later, perhaps to other experts than those under which they were drawn."""
    if not req.return_routed_experts or not req.output_ids or (capturer := _capturer()) is None:
        return
    kept = getattr(req, _KEPT, None)
    start = req.routed_experts_start_len + (0 if kept is None else len(kept))
    tokens = len(req.origin_input_ids) + len(req.output_ids)
    if start < tokens - 1:
        more = capturer.get_topk(req.kv.req_pool_idx, tokens, req_to_token_pool, start)
        setattr(req, _KEPT, more if kept is None else torch.cat((kept, more)))


def collect(original: Callable, processor: Any, req: Any) -> None:
    """Hook around SchedulerBatchResultProcessor._maybe_collect_routed_experts, when a request has ended."""
    original(processor, req)
    if (routes := req.routed_experts) is None:
        return
    if (kept := getattr(req, _KEPT, None)) is not None:
        routes[: len(kept)] = kept
    req.routed_experts = narrowed(routes, _shape(processor.model_config))


def narrowed(routes: torch.Tensor, shape: RouteShape) -> torch.Tensor | None:
    """int32 [tokens, all layers, experts per token] as uint8 or int16 [tokens, layers, experts per token];
    None where a number is no expert's."""
    chosen = routes[:, list(shape.layers)]
    if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < shape.experts:
        return None
    return chosen.to(getattr(torch, shape.dtype)).contiguous()


def put(scheduler: Any, slots: torch.Tensor, routes: bytes) -> None:
    """The routes of moved KV, whose slots are `slots`, int64 [tokens] on the CPU: the first ones of `routes`.
    Raises KvRefused where an engine that returns routes would not know these."""
    if (capturer := _capturer()) is None:
        return
    shape = _shape(scheduler.tp_worker.model_runner.model_config)
    found, each = np.frombuffer(routes, shape.dtype), len(shape.layers) * shape.per_token
    if len(found) < len(slots) * each:
        raise KvRefused(
            f"KV import refused: routes of {len(found) // each} tokens came with the KV of {len(slots)}, and "
            "this engine returns routes"
        )
    rows = torch.from_numpy(found[: len(slots) * each].astype(np.int32))
    layers = torch.tensor(shape.layers)
    capturer.host_cache.buffer[slots[:, None], layers] = rows.view(len(slots), -1, shape.per_token)
