"""The one adapter of Megatron-core: builds the policy with its DDP and optimizer from a Hugging Face directory, runs it, and writes it
back.

trainer/learner.py trains through it, trainer/publisher.py reads its canonical tensors, trainer/checkpoint.py its state. The same code
runs on GPUs and, under trainer/cpu.py's shim, on the CPU. Needs the trainer world (cluster/world.py) to be there.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.trainer.adam import prime
from laminar_hpc.trainer.attention import PackedCausalAttention, PackedRotary
from laminar_hpc.trainer.cpu import cuda_as_cpu, native_calls
from laminar_hpc.trainer.logprobs import entropy, mask_padding, token_logprobs
from laminar_hpc.trainer.microbatch import MicroBatch, Pack, make_pack
from laminar_hpc.weights.hf import ModelShape, TensorReader, read_shape, save_directory
from laminar_hpc.weights.mapping import Piece, Shard, check_names, pieces
from laminar_hpc.weights.probe import probe_sequences

# The padded vocabulary is a multiple of this at every tensor-parallel size that divides it, so a checkpoint fits all of them.
_VOCAB_MULTIPLE = 32
_FOREVER = 10**12  # steps of a constant schedule

# (micro-batch, log-probs with gradient, entropies), each [trained] -> the summed loss, what it counts for in the denominator (int32), and
# whatever is to be collected
Loss = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def local_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _transformer_config(shape: ModelShape, config: RunConfig, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.family.qkv_bias,
        qk_layernorm=shape.family.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=config.trainer.tensor_parallel,
        pipeline_model_parallel_size=config.trainer.pipeline_parallel,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one that Megatron allows beside variable_seq_lengths; there are no experts
        calculate_per_token_loss=True,  # gradients are sums over tokens, divided once by the mini-batch's tokens over all ranks
        use_cpu_initialization=True,
        perform_initialization=False,  # every weight comes from the Hugging Face directory
        gradient_accumulation_fusion=False,  # these four need apex or Transformer Engine
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )


class MegatronPolicy:
    """A policy under training. All methods but the `canonical_*` are collective over the trainer world."""

    def __init__(self, config: RunConfig) -> None:
        """Builds from config.model.path. Raises LaminarError when the directory is not a model that this can train."""
        logging.getLogger("megatron").setLevel(logging.WARNING)
        self.config, self.device = config, local_device()
        self.dtype, self.shape = getattr(torch, config.model.dtype), read_shape(config.model.path)
        torch.set_num_threads(config.trainer.threads)
        with cuda_as_cpu():
            if not parallel_state.model_parallel_is_initialized():
                parallel_state.initialize_model_parallel(
                    config.trainer.tensor_parallel,
                    config.trainer.pipeline_parallel,
                    distributed_timeout_minutes=math.ceil(config.cluster.join_timeout_seconds / 60),
                )
            torch.manual_seed(config.seed)
            tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
            self._build_model()
            self._build_optimizer()

    # ---- building --------------------------------------------------------------------------------------------------------------

    def _build_model(self) -> None:
        shape = self.shape
        self.transformer = _transformer_config(shape, self.config, self.dtype)
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.family.qk_norm)
        spec.submodules.self_attention.submodules.core_attention = PackedCausalAttention
        self.gpt = GPTModel(
            self.transformer,
            spec,
            vocab_size=math.ceil(shape.vocab / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE,
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            share_embeddings_and_output_weights=shape.tied,
            parallel_output=True,
        )
        self._rotary = PackedRotary(self.gpt.rotary_pos_emb)
        self.gpt.rotary_pos_emb = self._rotary
        self._selected: torch.Tensor | None = None
        if self.gpt.post_process:
            self.gpt.output_layer.register_forward_pre_hook(self._keep_selected)
        self.gpt.to(self.device)
        self._load_hf(Path(self.config.model.path))
        module = Float16Module(self.transformer, self.gpt) if self.transformer.bf16 else self.gpt
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=self.config.trainer.distributed_optimizer)
        self.model = DistributedDataParallel(self.transformer, ddp, module)
        self.pieces = self._pieces()  # anew, because the distributed optimizer moves parameters into its buffers

    def _build_optimizer(self) -> None:
        c, updates = self.config.optimizer, self.config.algorithm.minibatches_per_step
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=c.lr,
                weight_decay=c.weight_decay,
                adam_beta1=c.beta1,
                adam_beta2=c.beta2,
                adam_eps=c.eps,
                clip_grad=c.clip_grad,
                bf16=self.transformer.bf16,
                params_dtype=self.dtype,
                use_distributed_optimizer=self.config.trainer.distributed_optimizer,
            ),
            [self.model],
        )
        prime(self.optimizer)
        # Also what keeps weight decay off norms and biases: Megatron multiplies a group's wd_mult in here and nowhere else.
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=c.lr / (c.warmup_steps * updates + 1),
            max_lr=c.lr,
            min_lr=c.lr,
            lr_warmup_steps=c.warmup_steps * updates,
            lr_decay_steps=_FOREVER,
            lr_decay_style="constant",
            start_wd=c.weight_decay,
            end_wd=c.weight_decay,
            wd_incr_steps=_FOREVER,
            wd_incr_style="constant",
        )
        self.transformer.finalize_model_grads_func = finalize_model_grads
        self.transformer.grad_scale_func = self.optimizer.scale_loss

    def _keep_selected(self, module: torch.nn.Module, inputs: tuple) -> tuple:
        """Before the output layer: only the places whose next token is asked for get logits. inputs[0] [tokens, 1, hidden]."""
        return (inputs[0].index_select(0, self._selected), *inputs[1:])

    # ---- forward and backward --------------------------------------------------------------------------------------------------

    def _forward(self, pack: Pack) -> torch.Tensor:
        """The last stage's logits [1, selected, vocabulary / TP] float32; another stage's hidden states."""
        self._selected, self._rotary.positions = pack.selected, pack.positions
        with native_calls():
            return self.model(pack.tokens[None], pack.positions[None], None, packed_seq_params=pack.layout)

    def _logprobs(
        self, output: torch.Tensor, pack: Pack, temperature: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = mask_padding(output[0].div_(temperature), self.shape.vocab)  # in place: with a real vocabulary these are gigabytes
        entropies = entropy(logits) if with_entropy else None
        return token_logprobs(logits, pack.targets), entropies

    def _schedule(self, step: Callable, data: Sequence[object], forward_only: bool) -> list:
        """Megatron's schedule (pipelined or not) over micro-batches; what the last stage collected of each, else nothing."""
        with cuda_as_cpu():
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(data),
                model=[self.model],
                num_microbatches=len(data),
                seq_length=self.config.trainer.tokens_per_microbatch,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> list[torch.Tensor]:
        """Gradients of the summed loss over the summed count, of all micro-batches of all data-parallel ranks; returns what `loss`
        collected on this rank."""

        def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            batch = next(batches)
            return self._forward(batch.pack), functools.partial(finish, batch)

        def finish(batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            with native_calls():
                logprobs, entropies = self._logprobs(output, batch.pack, self.config.sampling.temperature, with_entropy=True)
                return loss(batch, logprobs, entropies)

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self._schedule(step, micro_batches, forward_only=False)

    def update(self) -> float | None:
        """One optimizer update with the gradients at hand. Returns their norm before clipping; None, and no update, when it is not
        finite."""
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
    def _read(self, packs: Sequence[Pack], read: Callable[[torch.Tensor, Pack], torch.Tensor]) -> list[torch.Tensor]:
        """`read(logits [1, places, vocabulary / TP], pack)` of each pack on the last stage; nothing on other stages."""

        def step(left: Iterator[Pack], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            pack = next(left)
            return self._forward(pack), lambda output, non_loss_data: read(output, pack)

        return self._schedule(step, packs, forward_only=True)

    def read_logits(self, sequences: list[list[int]], read: Callable[[torch.Tensor, Pack], torch.Tensor]) -> list[torch.Tensor]:
        """`_read` at the places of all tokens of all sequences but the first of each."""
        return self._read([make_pack(sequences, [range(1, len(s)) for s in sequences], self.device)], read)

    def score(self, packs: Sequence[Pack]) -> list[torch.Tensor]:
        """Log-probs of each pack's targets at the sampling temperature, as in `accumulate`: float32 [trained] each, on the last stage."""
        return self._read(packs, lambda output, pack: self._logprobs(output, pack, self.config.sampling.temperature, False)[0])

    def logprobs(self, sequences: list[list[int]]) -> torch.Tensor:
        """Log-probs of all tokens but the first of each sequence, at temperature 1, flattened; float32 on the CPU, empty but on the last
        stage."""
        found = self.read_logits(sequences, lambda output, pack: self._logprobs(output, pack, 1.0, with_entropy=False)[0])
        return torch.cat([f.cpu() for f in found]) if found else torch.empty(0)

    def probe_logprobs(self) -> list[float]:
        """Log-probs of weights/probe.py's sequences on the live weights."""
        return self.logprobs(probe_sequences(self.shape.vocab)).tolist()

    # ---- Hugging Face ----------------------------------------------------------------------------------------------------------

    def _pieces(self) -> list[Piece]:
        shard = Shard(parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size())
        layers = self.gpt.decoder.layers
        first = layers[0].layer_number - 1 if len(layers) else 0
        return pieces(dict(self.gpt.named_parameters()), self.shape, first, shard)

    @torch.no_grad()
    def _load_hf(self, directory: Path) -> None:
        for parameter in self.gpt.parameters():
            parameter.zero_()  # the vocabulary's padding has no counterpart in the directory
        local = self._pieces()
        with TensorReader(directory) as tensors:
            if parallel_state.get_pipeline_model_parallel_world_size() == 1:
                check_names({p.name for p in local}, tensors.names(), self.shape.tied, str(directory))
            for piece in local:
                if (there := tensors.shape(piece.name)) != piece.shape:
                    raise LaminarError(f"{directory}: {piece.name} is {there}, config.json says {piece.shape}; download the model again")
                piece.load(tensors.narrow(piece.name, piece.dim, piece.start, piece.length))

    def canonical_metadata(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and serving dtype of each canonical tensor that this rank holds, in the order of a Hugging Face state dict."""
        return [(p.name, p.slice_shape, self.dtype) for p in self.pieces]

    @torch.no_grad()
    def canonical_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The live parameters under Hugging Face names, contiguous, in the serving dtype, in the order of `canonical_metadata`.

        Views of the parameters where the layouts agree: read them before the next optimizer update.
        """
        for piece in self.pieces:
            yield piece.name, piece.value().to(self.dtype).contiguous()

    def save_hf(self, directory: Path) -> None:
        """A complete Hugging Face directory with the live weights; rank 0 writes, and only it need call this."""
        save_directory(self.config.model.path, directory, self.canonical_tensors())
