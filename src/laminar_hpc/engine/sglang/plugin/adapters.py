"""LoRA adapters inside SGLang: how one gets into its memory pool and out of it, and that a request of one
that is not there is refused.

SGLang's own loader reads files, copies through the CPU at the first request that names an adapter, and may
evict it. Here a slot's bytes go straight to a free place of the pool, are summed up there, and stay (pinned,
as SGLang calls it) until `unload`. An adapter's id is its weight id, which SGLang puts into the keys of its
prefix cache by itself (schedule_batch.py:1122), and which each answer reports.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar_hpc.config.adapters import ADAPTER_CONFIG_FILE, ADAPTER_PREFIX
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine.sglang.plugin import protocol
from laminar_hpc.weights.kernels.slices import LocalSlice

# projections that SGLang fuses -> the name of the fused one, and which part of it they are
_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


@dataclass(frozen=True)
class AdapterRank:
    """What SGLang asks of an adapter's configuration (lora_manager.py:536)."""

    r: int


@dataclass(frozen=True)
class ResidentAdapter:
    """What SGLang asks of an adapter that is in its pool (lora_manager.py:535)."""

    config: AdapterRank
    scaling: float


def manager_of(scheduler: Any) -> Any:
    """SGLang's LoRAManager. Raises LaminarError in an engine that was started without adapters."""
    manager = scheduler.tp_worker.model_runner.lora_manager
    if manager is None:
        raise LaminarError("this engine was started without adapters; set model.lora.rank")
    return manager


def loaded(scheduler: Any) -> set[str] | None:
    """The adapters that can be named; None in an engine that was started without."""
    manager = scheduler.tp_worker.model_runner.lora_manager
    return None if manager is None else set(manager.loras)


def adapter_views(base: Iterable[LocalSlice], pool: Any, place: int) -> Iterator[LocalSlice]:
    """What this rank holds of the adapter at `place` of SGLang's LoRAMemoryPool, under PEFT names.

    `base`: this rank's slices of the weights. Of a weight that is split by rows lora_B is split alike and
    lora_A whole, of one that is split by columns the other way round. Parts of a fused projection lie behind
    each other, `rank` rows of A each.
    """
    rank = pool.max_lora_rank
    rows: Counter[tuple[str, int]] = Counter()  # of B that the parts before have
    for held in base:
        module, _, kind = held.name.rpartition(".")
        part = module.rpartition(".")[2]
        target, number = _FUSED.get(part, (part, 0))
        if kind != "weight" or target not in pool.A_buffer:
            continue
        layer = int(re.findall(r"\.layers\.(\d+)\.", module)[0])
        a = pool.A_buffer[target][layer][place][number * rank : (number + 1) * rank]
        b = pool.B_buffer[target][layer][place]
        outputs, inputs = held.shape
        if held.dim:
            columns = held.dim, held.start, held.length
            yield LocalSlice(_name(module, "A"), (rank, inputs), *columns, a)
            yield LocalSlice(_name(module, "B"), (outputs, rank), 0, 0, outputs, b)
        else:
            first = rows[target, layer]
            rows[target, layer] += held.length
            own = b[first : first + held.length]
            yield LocalSlice(_name(module, "A"), (rank, inputs), 0, 0, rank, a)
            yield LocalSlice(_name(module, "B"), (outputs, rank), 0, held.start, held.length, own)


def _name(module: str, half: str) -> str:
    return f"{ADAPTER_PREFIX}{module}.lora_{half}.weight"


def load(scheduler: Any, base: Iterable[LocalSlice], request: protocol.LoadAdapter) -> protocol.PortReply:
    """The slot's adapter into a free place; answered with what is then in it. Requests go on: none of them
    names it yet. Raises LaminarError, with nothing that can be named, where it does not fit."""
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.lora.mem_pool import EMPTY_SLOT

    from laminar_hpc.engine.sglang.plugin.live_weights import live_layout
    from laminar_hpc.engine.sglang.plugin.load_slot import load_slot

    manager, name, directory = manager_of(scheduler), str(request.weight_id), Path(request.directory)
    pool = manager.memory_pool
    if name in manager.loras:
        raise LaminarError(f"weight id {name} is loaded already")
    free = [place for place, uid in enumerate(pool.buffer_id_to_uid) if uid is EMPTY_SLOT]
    if not free:
        raise LaminarError(
            f"no place for the adapter of weight id {name}: {', '.join(sorted(manager.loras))} are loaded"
        )
    config = json.loads((directory / ADAPTER_CONFIG_FILE).read_bytes())
    if config["r"] != pool.max_lora_rank:
        raise LaminarError(
            f"the adapter of weight id {name} has rank {config['r']}, this engine {pool.max_lora_rank}"
        )
    held = list(adapter_views(base, pool, free[0]))
    sums = load_slot(held, directory)
    pool.uid_to_buffer_id[name] = free[0]
    pool.buffer_id_to_uid[free[0]] = name
    pool.eviction_policy.mark_used(name)
    manager.loras[name] = ResidentAdapter(AdapterRank(config["r"]), config["lora_alpha"] / config["r"])
    manager.lora_refs[name] = LoRARef(lora_id=name, lora_name=name, lora_path=str(directory), pinned=True)
    manager.num_pinned_loras += 1
    return protocol.LiveAdapter(live_layout(iter(held)), sums)


def unload(scheduler: Any, request: protocol.UnloadAdapter) -> protocol.PortReply:
    """The adapter's place is free, with zeros in it; refused while requests of it wait or run here."""
    manager, name = manager_of(scheduler), str(request.weight_id)
    running = {r.rid for r in _requests(scheduler) if r.lora_id == name}
    if running:
        return protocol.OperationRefused(
            f"the adapter of weight id {name} stays: {len(running)} requests of it run"
        )
    if name in manager.loras:
        # the public method only writes two lines into the log around this one
        result = manager._unload_lora_adapter(manager.lora_refs[name])
        if not result.success:
            raise LaminarError(f"SGLang does not unload weight id {name}: {result.error_message}")
    return protocol.KvDone(0)


def _requests(scheduler: Any) -> Iterator[Any]:
    """All that are queued or in a batch."""
    yield from scheduler.waiting_queue
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req
    for batch in (scheduler.running_batch, scheduler.last_batch):
        yield from batch.reqs if batch is not None else ()


# ---- hooks -------------------------------------------------------------------------------------------------


def only_loaded(original: Callable, scheduler: Any, request: Any, **rest: Any) -> None:
    """Around Scheduler.handle_generate_request: a request whose adapter is not here fails. SGLang would end
    the scheduler by an assertion, or draw from the base."""
    name, known = request.lora_id, loaded(scheduler)
    if name is not None and name not in (known or ()):
        request.lora_id = None  # SGLang puts it into a batch, to end there
        text = f"no adapter of weight id {name!r}; loaded: {', '.join(sorted(known or ())) or 'none'}"
        rest["mm_input_error"] = text
    original(scheduler, request, **rest)


def report(original: Callable, stream: Any, *, req: Any) -> None:
    """Around _GenerationStreamAccumulator.accept: a finished answer names the adapter that drew it, where
    SGLang has one name for all."""
    before = len(stream.weight_versions)
    original(stream, req=req)
    for spans in stream.weight_versions[before:]:
        _rename(spans, req.lora_id)


def report_abort(original: Callable, request: Any, *arguments: Any, **rest: Any) -> Any:
    """Around _make_abort_req: the same of an answer that ends in the queue."""
    message = original(request, *arguments, **rest)
    _rename(message.weight_versions, request.lora_id)
    return message


def _rename(spans: list | None, adapter: str | None) -> None:
    for span in spans or () if adapter is not None else ():
        span.version = adapter
