"""What SGLang's scheduler does around a step of a speculating engine, in fewer operations where the step is
plain. Put around its functions by hooks.py, for engines on the CPU.

With many requests nothing is guessed (policies/speculation.py), and a step is to cost what it costs without
speculation. SGLang walks over all requests for slots that drafts may need, for the memory that these slots
will take, and for the drafts that were right, and notes all fields of the batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from laminar_hpc.engine.sglang.speculation import DRAFTED

# fields of a batch that a step with drafts changes
CHANGED = (
    "forward_mode",
    "input_ids",
    "out_cache_loc",
    "seq_lens",
    "seq_lens_cpu",
    "seq_lens_sum",
    "spec_info",
)


def _have_slots(requests: list) -> bool:
    """Whether each has KV slots for the longest step."""
    return all(each.kv.kv_allocated_len - each.kv.kv_committed_len > DRAFTED for each in requests)


def _penalizes(batch: Any) -> bool:
    return batch.sampling_info.penalizer_orchestrator.is_required


def reserve(original: Callable, batch: Any) -> None:
    """Around eagle_prepare_for_decode, which makes up the slots of each request to those of two steps: only
    once one has too few left, then for several steps."""
    if _penalizes(batch) or not _have_slots(batch.reqs):
        original(batch)
        return
    batch.maybe_evict_swa()
    for request in batch.reqs:
        request.decode_batch_idx += 1


def needed(original: Callable, batch: Any, requests: list, page_size: int) -> int:
    """Around ScheduleBatch._new_tokens_required_next_decode_spec_v2: the slots that `reserve` will take."""
    return 0 if _have_slots(requests) else original(batch, requests, page_size)


@contextmanager
def isolated(original: Callable, scheduler: Any, batch: Any, *, overlap: bool) -> Iterator[None]:
    """Around Scheduler._forward_isolation, which puts some hundred fields of the batch back after a step.
    A plain one leaves them as a step without speculation does; one that verifies changes these."""
    if overlap or batch.has_grammar or not batch.forward_mode.is_decode() or _penalizes(batch):
        with original(scheduler, batch, overlap=overlap):
            yield
        return
    before = {name: getattr(batch, name) for name in CHANGED}
    try:
        yield
    finally:
        if batch.forward_mode is not before["forward_mode"]:
            for name, value in before.items():
                setattr(batch, name, value)


def taken(original: Callable, processor: Any, result: Any, batch: Any) -> list[list[int]]:
    """Around SchedulerBatchResultProcessor._resolve_spec_v2_tokens: the tokens of each request, which a plain
    step brings one of. SGLang's histogram of right drafts is of steps that verify some."""
    if result.speculative_num_draft_tokens != 1 or batch.has_grammar:
        return original(processor, result, batch)
    for request in batch.reqs:
        request.kv.kv_committed_len += 1
        request.spec_verify_ct += 1
    result.num_correct_drafts_per_req_cpu = [0] * len(batch.reqs)
    result.num_correct_drafts = result.num_block_accept_tokens = result.num_cap_tokens = 0
    return [[token] for token in result.next_token_ids.tolist()]
