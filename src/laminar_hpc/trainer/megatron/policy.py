"""The one adapter of Megatron-core: builds the policy with its DDP and optimizer from a Hugging Face
directory, runs it, and writes it back.

trainer/step/learner.py trains through it, trainer/publishing/ packs its canonical tensors,
trainer/checkpoint.py reads its state. The same code runs on GPUs and, under trainer/megatron/cpu.py's shim,
on the CPU. Needs the trainer world (trainer/world.py) to be there.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from laminar_hpc.config.adapters import ADAPTER_FILE
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import head_in_chunks, model_config
from laminar_hpc.config.routing import replayed_routes
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.trainer.canonical.exchange import Exchange
from laminar_hpc.trainer.canonical.gather import Canonical
from laminar_hpc.trainer.canonical.plan import HeldSlice
from laminar_hpc.trainer.megatron.adapters import set_initial
from laminar_hpc.trainer.megatron.attention import takes_packs
from laminar_hpc.trainer.megatron.building import (
    build_chunks,
    build_optimizer,
    has_float32_head,
    let_segments_grow,
    transformer_config,
    uses_transformer_engine,
    wrap,
)
from laminar_hpc.trainer.megatron.chunks import run_schedule, stage_module
from laminar_hpc.trainer.megatron.context import context_ranks, heads_in_attention, joined, joined_rows
from laminar_hpc.trainer.megatron.cpu import cuda_as_cpu, native_calls
from laminar_hpc.trainer.megatron.flash import use_fastest_attention
from laminar_hpc.trainer.megatron.groups import make_groups
from laminar_hpc.trainer.megatron.head import HeadSwitch, chunked_logprobs, whole_logprobs
from laminar_hpc.trainer.megatron.linear import float32_product
from laminar_hpc.trainer.megatron.loading import load_slices, load_whole, names_of_all, own_slices
from laminar_hpc.trainer.megatron.packs import Pack, Packed, make_pack
from laminar_hpc.trainer.megatron.rope import rope_frequencies, rope_magnitude, rotation_of
from laminar_hpc.trainer.megatron.routing import RoutingReplay
from laminar_hpc.weights.finite import all_finite, culprits
from laminar_hpc.weights.hf import read_shape
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.kernels.sums import LazySums
from laminar_hpc.weights.lanes import Lane
from laminar_hpc.weights.probe import probe_sequences
from laminar_hpc.weights.stream import TensorSpan

Batch = TypeVar("Batch", bound=Packed)
Collected = TypeVar("Collected")
_CPU = torch.device("cpu")


def local_device() -> torch.device:
    """This process's current GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


class MegatronPolicy:
    """A policy under training. All methods but `canonical_metadata` are collective over the trainer world."""

    def __init__(self, config: RunConfig) -> None:
        """Builds from config.model.path. Raises LaminarError when the directory is not a model that this can
        train."""
        logging.getLogger("megatron").setLevel(logging.WARNING)
        self.config = config
        self.device = local_device()
        self.dtype = getattr(torch, config.model.dtype)
        self.shape = read_shape(config.model.path)
        self._lora = config.model.lora if config.model.lora.rank else None
        torch.set_num_threads(config.trainer.threads)
        let_segments_grow()
        with cuda_as_cpu():
            make_groups(config)
            torch.manual_seed(config.seed)
            tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
            self._build_model()
            self._build_optimizer()

    # ---- building ------------------------------------------------------------------------------------------

    def _build_model(self) -> None:
        self.transformer = transformer_config(self.shape, self.config, self.dtype)
        chunks = self._build_chunks()
        self.gpt = stage_module(chunks)
        self._frequencies = rope_frequencies(self.shape).to(self.device)
        windowed, self._windowed_frequencies = self.shape.windows, None
        if windowed is not None and windowed.rope_theta is not None:
            self._windowed_frequencies = rope_frequencies(self.shape, windowed=True).to(self.device)
        self._magnitude = rope_magnitude(self.shape).to(self.device)
        self._selected: torch.Tensor | None = None
        self._last = chunks[-1]
        if self._last.post_process:
            self._take_head()
            self._last.output_layer.register_forward_pre_hook(self._keep_selected)
        self.gpt.to(self.device)
        routes = replayed_routes(self.config, model_config(self.config.model.path))
        self.routing = RoutingReplay(routes, chunks, self.device) if routes else None
        local = self._slices_of(chunks)
        self._join(local)
        if takes_packs(self.device, self.dtype) and not uses_transformer_engine(self.config):
            share = self.config.trainer.tensor_parallel
            own = self.shape.heads // share, self.shape.kv_heads // share
            heads = heads_in_attention(*own, context_ranks())
            use_fastest_attention(self.device, heads, self.shape.head_dim, self.shape.windows is not None)
        self._load_model(chunks, local)
        self.models = wrap(self.transformer, chunks, self.config)
        # anew, because the distributed optimizer moves parameters into its buffers
        self.slices = self._slices_of(chunks)

    # What a critic has otherwise, see value.py.

    def _build_chunks(self) -> list[GPTModel]:
        return build_chunks(self.transformer, self.shape, self.config)

    def _take_head(self) -> None:
        self._head = HeadSwitch(self._last.output_layer)

    def _slices_of(self, chunks: Sequence[GPTModel]) -> list[LocalSlice]:
        return own_slices(chunks, self.shape, self._lora)

    def _join(self, local: list[LocalSlice]) -> None:
        cluster, relay = self.config.cluster, self.config.relay
        self._canonical = Canonical(
            local, self.dtype, relay.lanes, cluster.join_timeout_seconds, relay.publish_timeout_seconds
        )

    def _build_optimizer(self) -> None:
        self.optimizer, self.scheduler = build_optimizer(self.config, self.models, self.dtype)
        self.transformer.finalize_model_grads_func = finalize_model_grads
        self.transformer.grad_scale_func = self.optimizer.scale_loss

    def _keep_selected(self, module: torch.nn.Module, inputs: tuple) -> tuple:
        """Before the output layer: only the places whose next token is asked for get logits. inputs[0]
        [tokens, 1, hidden], or with sequence parallelism this rank's share of the tokens."""
        hidden = inputs[0]
        if self.transformer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return (hidden.index_select(0, self._selected), *inputs[1:])

    # ---- forward and backward ------------------------------------------------------------------------------

    def _in_chunks(self, pack: Pack) -> bool:
        """Whether the last stage hands on hidden states of this pack, and its logits come in chunks."""
        layer, size = self._last.output_layer, self.dtype.itemsize
        shape = layer.output_size_per_partition, layer.input_size, size, self._lora is None
        return pack.teacher is not None or head_in_chunks(len(pack.selected), *shape)

    def _forward(
        self, pack: Pack, hands_on: bool | None = None, model: torch.nn.Module | None = None
    ) -> torch.Tensor:
        """Through one of `models`, by default the first. The last stage's logits [1, selected,
        vocabulary / TP] float32, or where it `hands_on`, by default where `_in_chunks`, its hidden states [1,
        selected, hidden]; another stage's or chunk's hidden states."""
        self._selected = pack.selected
        if self._last.post_process:
            self._head.hands_on = self._in_chunks(pack) if hands_on is None else hands_on
        with native_calls():
            rotation = rotation_of(self._frequencies, pack.positions, self._magnitude)
            windowed = None
            if self._windowed_frequencies is not None:
                windowed = rotation_of(self._windowed_frequencies, pack.positions)
            layout = replace(pack.layout, rotation=rotation, windowed_rotation=windowed)
            run = model or self.models[0]
            return run(pack.tokens[None], pack.positions[None], None, packed_seq_params=layout)

    def _logprobs(self, output: torch.Tensor, pack: Pack, temperature: float) -> tuple[torch.Tensor, ...]:
        """What `chunked_logprobs` gives, of all of the pack's targets, on each context-parallel rank."""
        own = self._own_logprobs(output, pack, temperature)
        return own if context_ranks() == 1 else joined(own, pack.wanted, pack.total)

    @property
    def head_weight(self) -> torch.nn.Parameter | None:
        """The output layer's, [vocabulary / TP, hidden]; None but on the last pipeline stage."""
        if not self._last.post_process or not self.shape.tied:
            return self._last.output_layer.weight if self._last.post_process else None
        return self._last.shared_embedding_or_output_weight()

    def _own_logprobs(self, output: torch.Tensor, pack: Pack, temperature: float) -> tuple[torch.Tensor, ...]:
        if self._in_chunks(pack):
            product = float32_product if has_float32_head(self.config, self.dtype) else F.linear
            rows = output[0].to(self.dtype), self.head_weight, pack.targets
            return chunked_logprobs(*rows, product, temperature, self.shape.vocab, pack.teacher)
        # `output[0]` would copy the gradient, which is gigabytes
        return whole_logprobs(output.squeeze(0), pack.targets, temperature, self.shape.vocab)

    def accumulate(
        self,
        micro_batches: Sequence[Batch],
        loss: Callable[..., tuple[torch.Tensor, torch.Tensor, Collected]],
    ) -> list[Collected]:
        """Gradients of the summed loss over the summed count, of all micro-batches of all data-parallel
        ranks. All ranks bring as many, see chunks.py; with pipeline stages, of equal size in tokens.

        `loss` of a micro-batch, its log-probs with gradient, its entropies and, where its pack has a teacher,
        the divergences from it, each [trained], gives the summed loss, its part of the denominator (int32),
        and what is to be collected. Returns what was collected on this rank: nothing but on the last stage.
        """

        def step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            batch = next(batches)
            return self._forward(batch.pack, model=model), functools.partial(finish, batch)

        def finish(batch: Batch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Collected]:
            with native_calls():
                values = self._logprobs(output, batch.pack, self.config.sampling.temperature)
                total, count, collected = loss(batch, *values)
            # each context-parallel rank has the whole loss, and Megatron adds their counts up
            return total, count * (parallel_state.get_context_parallel_rank() == 0), collected

        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        with cuda_as_cpu():
            found = run_schedule(step, self.models, micro_batches, lambda batch: batch.pack.size, False)
        if self.routing is not None:
            self.routing.check_consumed()
        return found

    def update(self) -> float | None:
        """One optimizer update with the gradients at hand. Returns their norm before clipping; None, and no
        update, when it is not finite."""
        with cuda_as_cpu():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())  # the same on all ranks
            if not math.isfinite(norm):
                return None
            self.optimizer.step()
            self.scheduler.step(increment=1)
            return norm

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self.optimizer.param_groups[0]["lr"]

    @torch.no_grad()
    def _read(
        self,
        packs: Sequence[Pack],
        read: Callable[[torch.Tensor, Pack], torch.Tensor],
        hands_on: bool | None = None,
    ) -> list[torch.Tensor]:
        """`read(what _forward gives, pack)` of each pack on the last stage; nothing on other stages."""

        def step(left: Iterator[Pack], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            pack = next(left)
            return self._forward(pack, hands_on, model), lambda output, non_loss_data: read(output, pack)

        with cuda_as_cpu():
            return run_schedule(step, self.models, packs, lambda pack: pack.size, True)

    def score(self, packs: Sequence[Pack]) -> list[torch.Tensor]:
        """Log-probs of each pack's targets at the sampling temperature, as in `accumulate`: float32 [trained]
        each, on the last stage."""
        temperature = self.config.sampling.temperature
        return self._read(packs, lambda output, pack: self._logprobs(output, pack, temperature)[0])

    def hidden_states(self, packs: Sequence[Pack]) -> list[torch.Tensor]:
        """What the head makes each pack's targets' logits of, [trained, hidden], on the last stage."""

        def read(output: torch.Tensor, pack: Pack) -> torch.Tensor:
            return joined_rows(output[0].to(self.dtype), pack.wanted, pack.total)

        return self._read(packs, read, hands_on=True)

    def logprobs(self, sequences: list[list[int]]) -> torch.Tensor:
        """Log-probs of all tokens but the first of each sequence, at temperature 1, flattened; float32 on the
        CPU, on every rank."""
        places = make_pack(sequences, [range(1, len(s)) for s in sequences], self.device)
        of_packs = self._read([places], lambda output, pack: self._logprobs(output, pack, 1.0)[0])
        values = (
            of_packs[0] if of_packs else torch.empty(sum(len(s) - 1 for s in sequences), device=self.device)
        )
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.broadcast(
                values,
                parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return values.cpu()

    def probe_logprobs(self) -> list[float]:
        """Log-probs of weights/probe.py's sequences on the live weights."""
        return self.logprobs(probe_sequences(self.shape.vocab)).tolist()

    # ---- Hugging Face --------------------------------------------------------------------------------------

    def _load_model(self, chunks: Sequence[GPTModel], local: list[LocalSlice]) -> None:
        """Of config.model.path, and then the adapter, whose slices `local` are, if there is one."""
        path, lora, names = Path(self.config.model.path), self._lora, self._canonical.slices
        if lora is None:
            load_whole(self.gpt, path, local, names, self.shape.tied)
            return
        model = own_slices(chunks, self.shape)
        of_model = names_of_all(model, self.config.cluster.join_timeout_seconds)
        load_whole(self.gpt, path, model, of_model, self.shape.tied)
        if lora.path:
            load_slices(Path(lora.path), local, names, tied=False, file=ADAPTER_FILE)
        else:
            set_initial(local, lora, self.config.seed)

    @torch.no_grad()
    def check_finite(self, step: int) -> None:
        """Raises LaminarError, naming tensors, when this rank's live parameters hold NaN or an infinity. Not
        collective."""
        if not all_finite(p for p in self.gpt.parameters() if p.requires_grad):
            wrong = culprits([(own.name, own.value()) for own in self.slices])
            raise LaminarError(
                f"after step {step} the weights are not finite: {wrong}; they were neither "
                f"published nor saved. Lower optimizer.lr (it is {self.config.optimizer.lr:g}), "
                "then go on from the newest checkpoint with resume=auto"
            )

    @property
    def canonical_slices(self) -> dict[str, list[HeldSlice]]:
        """Of each canonical tensor, which rank of the first replica holds what, see canonical/plan.py."""
        return self._canonical.slices

    def load_hf(self, directory: Path) -> None:
        """The weights of a Hugging Face directory, or the adapter of one of PEFT's, of which each rank reads
        its own slices. Raises LaminarError when it is not this model."""
        if self._lora is None:
            load_whole(self.gpt, directory, self.slices, self._canonical.slices, self.shape.tied)
        else:
            load_slices(directory, self.slices, self._canonical.slices, tied=False, file=ADAPTER_FILE)

    def canonical_metadata(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and serving dtype of each canonical tensor of the whole model, in the order of a
        Hugging Face state dict."""
        return self._canonical.metadata(self.dtype)

    @torch.no_grad()
    def canonical_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """On rank 0 the live parameters under Hugging Face names, whole and contiguous, in the serving dtype,
        in the order of `canonical_metadata`; the other ranks, which send what they hold, get none, but must
        run through them too.

        Views of the parameters where the layouts agree: read them before the next optimizer update.
        """
        yield from self._canonical.tensors(self.slices, self.dtype, self.device)

    @property
    def publishing(self) -> Exchange:
        """The trainer ranks that take part in `pack`, and their words to each other."""
        return self._canonical.publishing

    @property
    def lanes(self) -> list[Lane]:
        """Which rank sends which bytes."""
        return self._canonical.lanes

    @torch.no_grad()
    def keep_copy(self) -> None:
        """Copies what this rank publishes; `pack` reads the copy from then on, and the weights may change."""
        self._canonical.keep(self.slices)

    @torch.no_grad()
    def pack(self, spans: Sequence[TensorSpan], bucket: torch.Tensor | None, lane: int = 0) -> LazySums:
        """The live parameters' share of one chunk of a lane into its sender's bucket (uint8, on `device`);
        None on other ranks. Not in step with the other methods: the ranks of `publishing` may call it from a
        thread beside the training.

        Returns on the sender what gives each span's share of its tensor's checksums, as long as the bucket is
        not written again.
        """
        return self._canonical.pack(self.slices, self.dtype, spans, bucket, lane)
