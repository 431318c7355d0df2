"""Speculative decoding that changes no distribution, for engines on the CPU: drafts are guessed from texts
(drafts.py) and one forward pass draws a token after each of them.

    request:   ... last | d1  d2  d3          what the pass reads
    drawn:           s1 | s2  s3  s4          each from the model, given all that stands before it
    kept:      s1; s2 if s1 = d1; s3 if also s2 = d2; s4 if also s3 = d3

s1 is drawn as it would be without drafts. s2 is drawn from the distribution after d1, which is that after s1
exactly where s1 = d1, and is thrown away otherwise; and so on. This is rejection sampling for a draft that is
a point mass (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", section
2.3), at any temperature, top-k, top-p and min-p. SGLang's own sampler draws, so log-probs are its own too.

SGLang runs it as a registered algorithm (speculative/spec_registry.py), which has the scheduler reserve KV
slots for drafts and take several tokens a step. Its own NGRAM takes the most probable token on a CPU
(eagle_utils.py, `_verify_uses_greedy`), whatever the temperature.
"""

import time
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from laminar_hpc.engine.sglang.plugin.cpu_functions import columns
from laminar_hpc.engine.sglang.plugin.drafts import Drafts
from laminar_hpc.engine.sglang.speculation import ALGORITHMS, TEXTS
from laminar_hpc.policies.speculation import SpeculationGate


def register() -> None:
    """Makes SGLang know the algorithms; before it parses its arguments, in the process that its schedulers
    are forked from."""
    for mode, name in ALGORITHMS.items():
        SpeculativeAlgorithm.register(name, supports_overlap=True, spec_class=PlainRelay)(
            lambda _, mode=mode: worker_class(mode)
        )


class PlainRelay(CustomSpecAlgo):
    """What the scheduler asks of an algorithm beside CustomSpecAlgo's answers."""

    create_future_map = SpeculativeAlgorithm.create_future_map

    def carries_draft_hidden_states(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return False


class NothingRelayed(SpecInput):
    """What a batch carries from step to step: the next draft is made from the requests themselves."""

    def __init__(self, lengths: torch.Tensor | None = None, positions: torch.Tensor | None = None) -> None:
        """Of a pass that verifies: rows of each request, int64 [requests], and positions of all rows."""
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.lengths = lengths
        self.positions = positions

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        pass

    def merge_batch(self, spec_info: "NothingRelayed") -> None:
        pass


def worker_class(mode: str) -> type:
    """The class that SGLang makes a scheduler's worker of; `mode` is that of rollout.speculation."""

    class Worker(SpeculationWorker):
        def __init__(self, target_worker: Any, **_: Any) -> None:
            super().__init__(target_worker, mode)

    return Worker


def room(request: Any) -> int:
    """Tokens that a step may add to a request: up to its last one, or to the next that its stream waits for
    (output_streamer.py:433 looks at a step's last token alone)."""
    parameters, length = request.sampling_params, len(request.output_ids)
    left = parameters.max_new_tokens - length
    interval = (request.stream and parameters.stream_interval) or 1  # 1: each step is sent
    return min(left, interval - (length - 1) % interval) if interval > 1 else left


def before_stop(request: Any, draft: list[int]) -> list[int]:
    """Without a token that ends the response, so that such a one can only be a step's last: a move looks at
    that alone (kv_cache.py, `moved_reason`)."""
    stops = (request.sampling_params.stop_token_ids or set()) | (request.eos_token_ids or set())
    return draft[: next((i for i, token in enumerate(draft) if token in stops), len(draft))]


def told(request: Any) -> list[int]:
    """Texts that came with it: engine/sglang/speculation.py."""
    return (request.sampling_params.custom_params or {}).get(TEXTS) or []


class SpeculationWorker(BaseSpecWorker):
    """Takes each batch of the scheduler to the model, with drafts or without."""

    draft_worker = None  # there is no second model

    def __init__(self, target_worker: Any, mode: str) -> None:
        super().__init__()
        from sglang.srt.runtime_context import get_spec

        self._target_worker = target_worker
        self.runner = target_worker.model_runner
        self.drafted = get_spec().speculative_num_draft_tokens - 1
        self.drafts = Drafts(others=mode != "ngram")
        self.gate = SpeculationGate() if mode == "auto" else None
        self._requests: list = []  # of the last step; SGLang makes a list anew where one leaves
        self._drawn: torch.Tensor | None = None  # their newest tokens, where that step was plain
        self._seen: dict[str, Any] = {}

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """SGLang's call when a request has its last token."""
        request = self._seen.pop(rid, None)
        if request is not None:
            self.drafts.ended(rid, request.origin_input_ids, request.output_ids_through_stop)

    def forward_batch_generation(
        self, batch: Any, on_publish: object = None, pp_proxy_tensors: object = None
    ) -> Any:
        """One step. SGLang restores the batch afterwards, but for lengths and what is carried on."""
        if not batch.forward_mode.is_decode():
            result = self.target_worker.forward_batch_generation(batch)
            result.new_seq_lens, result.next_draft_input = batch.seq_lens, NothingRelayed()
            return result
        began, requests = time.thread_time(), len(batch.reqs)
        if batch.reqs is not self._requests or len(batch.reqs) != len(self._seen):
            self._look_at(batch.reqs)
        drafts = self._draft(batch) if self.gate is None or self.gate.verifies(requests) else []
        verified = any(drafts)
        result = self._verify(batch, drafts) if verified else self._plain(batch)
        result.new_seq_lens = batch.seq_lens + result.accept_lens if verified else batch.seq_lens
        if self.gate is not None:
            brought = float(result.accept_lens.sum()) / requests if verified else 1.0
            self.gate.record(requests, verified, time.thread_time() - began, brought)
        return result

    def _look_at(self, requests: list) -> None:
        """Others run than in the last step. Texts that came with a request are learned once."""
        for request in requests:
            if request.rid not in self._seen and (texts := told(request)):
                self.drafts.learn(texts)
        self._requests = requests
        self._drawn = None
        self._seen = {request.rid: request for request in requests}
        self.drafts.forget(set(self._seen))

    def _draft(self, batch: Any) -> list[list[int]]:
        """Of each request; all empty where a token depends on those before it by more than the model."""
        info = batch.sampling_info
        if batch.has_grammar or info.has_custom_logit_processor or info.acc_additive_penalties is not None:
            return []
        if info.acc_scaling_penalties is not None or info.sampling_mask_batch_indices is not None:
            return []
        self.drafts.take_in()
        found = []
        for request in batch.reqs:
            count = min(self.drafted, room(request) - 1)
            draft = self.drafts.draft(request.rid, request.origin_input_ids, request.output_ids, count)
            found.append(before_stop(request, draft))
        return found

    def _plain(self, batch: Any) -> Any:
        """One token a request, as without speculation. Between steps `seq_lens` leaves out the token whose KV
        is to be made."""
        if self._drawn is None:
            self._drawn = torch.tensor([request.output_ids[-1] for request in batch.reqs])
        batch.input_ids = self._drawn
        table = batch.req_to_token_pool.req_to_token
        batch.out_cache_loc = table[batch.req_pool_indices, batch.seq_lens].to(torch.int64)
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu, batch.seq_lens_sum, batch.spec_info = batch.seq_lens_cpu + 1, None, None
        result = self.target_worker.forward_batch_generation(batch)
        self._drawn = result.next_token_ids.long()
        return kept(result, torch.ones(len(batch.reqs), dtype=torch.int64), 1, result.next_token_ids)

    def _verify(self, batch: Any, drafts: list[list[int]]) -> Any:
        """Draws after each draft and keeps what agrees. Rows of request i are its last token and its draft,
        of `lengths[i]` tokens together; in the results each request has `longest` columns."""
        lengths = torch.tensor([1 + len(draft) for draft in drafts])
        longest = int(lengths.max())
        forward, rows = self._forward_batch(batch, drafts, lengths)
        self._drawn = None
        result = self.target_worker.forward_batch_generation(None, forward_batch=forward, is_verify=True)
        logits = result.logits_output
        # a copy of the settings for each row
        info = per_row(batch.sampling_info, lengths)
        self.runner._preprocess_logits(logits, info)
        each = lengths.tolist()
        drawn = self.runner.sampler(
            logits,
            info,
            batch.return_logprob,
            repeated(batch.top_logprobs_nums, each),
            repeated(batch.token_ids_logprobs, each),
            forward.positions,
        )
        tokens = torch.zeros(len(drafts), longest, dtype=torch.int64)
        tokens[rows] = drawn.long()
        guessed = torch.full((len(drafts), longest), -1)
        guessed[rows] = forward.input_ids.roll(-1)
        guessed[torch.arange(len(drafts)), lengths - 1] = -1  # nothing is guessed after a request's last row
        agreed = (tokens == guessed).long().cumprod(1).sum(1)
        if batch.return_logprob:
            spread_logprobs(logits, rows, longest)
        return kept(result, agreed + 1, longest, tokens.flatten())

    def _forward_batch(
        self, batch: Any, drafts: list[list[int]], lengths: torch.Tensor
    ) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
        """The pass as an extension of each request by `lengths` tokens, and where its rows belong: requests
        and columns, int64 [rows] each."""
        input_ids = [
            token
            for request, draft in zip(batch.reqs, drafts, strict=True)
            for token in (request.output_ids[-1], *draft)
        ]
        requests = torch.arange(len(drafts)).repeat_interleave(lengths)
        positions = columns(batch.seq_lens, lengths)
        table = batch.req_to_token_pool.req_to_token
        prefixes = batch.seq_lens
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = torch.tensor(input_ids)
        batch.out_cache_loc = table[batch.req_pool_indices[requests], positions].to(torch.int64)
        batch.seq_lens = prefixes + lengths
        batch.seq_lens_cpu, batch.seq_lens_sum = batch.seq_lens, None
        batch.spec_info = NothingRelayed(lengths, positions)
        forward = ForwardBatch.init_new(
            batch,
            self.runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        batch.seq_lens = prefixes
        forward.extend_prefix_lens, forward.extend_seq_lens = prefixes.int(), lengths.int()
        forward.extend_prefix_lens_cpu, forward.extend_seq_lens_cpu = prefixes.tolist(), lengths.tolist()
        forward.extend_num_tokens = len(input_ids)
        return forward, (requests, positions - prefixes[requests])


def kept(result: Any, lengths: torch.Tensor, columns: int, tokens: torch.Tensor) -> Any:
    """What the scheduler takes of a step: the first `lengths[i]` of the `columns` tokens of request i."""
    result.accept_lens, result.next_token_ids = lengths, tokens
    result.speculative_num_draft_tokens, result.next_draft_input = columns, NothingRelayed()
    logprobs = result.logits_output.next_token_logprobs
    if logprobs is not None:
        result.logits_output.next_token_logprobs = logprobs.view(len(lengths), columns)
    return result


def per_row(info: Any, lengths: torch.Tensor) -> Any:
    """Sampling settings of requests, `lengths[i]` times each."""
    names = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")
    values = {name: getattr(info, name) for name in names}
    return replace(
        info,
        **{
            name: None if value is None else value.repeat_interleave(lengths, dim=0)
            for name, value in values.items()
        },
    )


def repeated(values: list | None, times: list[int]) -> list | None:
    """Each value as often as said."""
    return values and [value for value, count in zip(values, times, strict=True) for _ in range(count)]


def spread_logprobs(logits: Any, rows: tuple[torch.Tensor, torch.Tensor], longest: int) -> None:
    """Puts what the sampler said of each row where the scheduler reads it: at request * longest + column."""
    requests, offsets = rows
    count = int(requests[-1]) + 1
    spread = logits.next_token_logprobs.new_zeros(count, longest)
    spread[rows] = logits.next_token_logprobs
    logits.next_token_logprobs = spread
    places = (requests * longest + offsets).tolist()
    for name in (
        "next_token_top_logprobs_val",
        "next_token_top_logprobs_idx",
        "next_token_token_ids_logprobs_val",
        "next_token_token_ids_logprobs_idx",
    ):
        if values := getattr(logits, name):
            table = [values[0]] * (count * longest)
            for place, value in zip(places, values, strict=True):
                table[place] = value
            setattr(logits, name, table)
