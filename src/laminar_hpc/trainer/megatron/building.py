"""What Megatron-core is told: the model's configuration and layers, its wrapper and its optimizer. Called by
trainer/megatron/policy.py alone.

On a GPU the layers are Transformer Engine's where that is installed, and apex's fused weight gradient is used
where it is built; else, and on the CPU, they are Megatron's own. Either way the attention takes packs
(trainer/megatron/attention.py).
"""

import functools
import importlib.util
import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from laminar_hpc.config.check import derive
from laminar_hpc.config.models import first_stage_layers
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.trainer.megatron.activation import use_own_activation
from laminar_hpc.trainer.megatron.adam import fuse, prime
from laminar_hpc.trainer.megatron.adapters import adapt_spec, add_adapters, is_replicated
from laminar_hpc.trainer.megatron.attention import PackedCausalAttention
from laminar_hpc.trainer.megatron.chunks import schedule_settings
from laminar_hpc.trainer.megatron.experts import expert_settings, is_router
from laminar_hpc.trainer.megatron.linear import bias_before_rounding, float32_output
from laminar_hpc.trainer.megatron.post_norms import add_post_norms
from laminar_hpc.trainer.megatron.recompute import Forgetting
from laminar_hpc.trainer.megatron.residual import Norm, SumNorm, join_sums_and_norms, sum_in_float32
from laminar_hpc.trainer.megatron.windows import window_settings
from laminar_hpc.weights.hf import ModelShape

# The padded vocabulary is a multiple of this at every tensor-parallel size that divides it, so a checkpoint
# fits all of them.
_VOCAB_MULTIPLE = 32
_FOREVER = 10**12  # steps of a constant schedule
_ACTIVATIONS = {
    "silu": F.silu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def installed(module: str) -> bool:
    """Whether a library that only GPUs can use is there, on a machine that has one."""
    return torch.cuda.is_available() and importlib.util.find_spec(module) is not None


def uses_transformer_engine(config: RunConfig) -> bool:
    """Whether the layers are Transformer Engine's: an adapter goes with Megatron's own ones only."""
    return installed("transformer_engine") and config.model.lora.rank == 0


def _rounds_as_sglang(config: RunConfig) -> bool:
    """Whether Megatron's own layers must be told where to round: Transformer Engine's cannot, and nothing is
    rounded in float32."""
    return config.model.dtype == "bfloat16" and not uses_transformer_engine(config)


def let_segments_grow() -> None:
    """Micro-batches differ in size, and CUDA's allocator would keep pieces for each: with segments that grow
    it does not, see PyTorch's notes on CUDA memory. A user's own setting stands."""
    given = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys()
    if torch.cuda.is_available() and not given:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _recomputed_by_megatron(config: RunConfig, experts: bool) -> dict[str, object]:
    """Its settings for trainer.recompute_activations. What selective means for dense layers is done by
    trainer/megatron/recompute.py; experts are computed twice."""
    choice = derive(config).recompute_activations
    if choice == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if choice == "selective" and experts:
        return {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    return {}


def transformer_config(shape: ModelShape, config: RunConfig, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration of a decoder of this shape, with parameters of `dtype`."""
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
        activation_func=_ACTIVATIONS[shape.family.activation],
        layernorm_zero_centered_gamma=shape.family.centered_norms,
        softmax_scale=shape.attention_scale,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.family.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=torch.float32 if _rounds_as_sglang(config) else dtype,
        deterministic_mode=config.model.deterministic,
        batch_p2p_sync=False,  # a wait for the whole device, and so for what the publisher sends beside it
        tensor_model_parallel_size=config.trainer.tensor_parallel,
        pipeline_model_parallel_size=config.trainer.pipeline_parallel,
        context_parallel_size=config.trainer.context_parallel,
        sequence_parallel=config.trainer.tensor_parallel > 1,
        num_layers_in_first_pipeline_stage=first_stage_layers(shape.layers, config.trainer.pipeline_parallel),
        **schedule_settings(config.trainer),
        **_recomputed_by_megatron(config, shape.experts is not None),
        # gradients are sums over tokens, divided once by the mini-batch's tokens over all ranks
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        perform_initialization=False,  # every weight comes from the Hugging Face directory
        gradient_accumulation_fusion=(  # apex's
            installed("fused_weight_gradient_mlp_cuda") and config.model.lora.rank == 0
        ),
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        rotary_interleaved=shape.family.interleaved,  # attention.py reads it
        bias_activation_fusion=torch.cuda.is_available() and shape.family.activation == "silu",
        bias_dropout_fusion=False,
        **expert_settings(shape.experts, config),
        **window_settings(shape.windows),
    )


def _block_spec(
    transformer: TransformerConfig, shape: ModelShape, config: RunConfig, chunk: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """The layers of this stage, or of a chunk of it, and the norm behind the last one."""
    if uses_transformer_engine(config):
        from laminar_hpc.trainer.megatron.te_attention import TransformerEngineAttention

        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=transformer.num_moe_experts,
            moe_grouped_gemm=transformer.moe_grouped_gemm,
            qk_layernorm=shape.family.qk_norm,
        )
        attention = spec.submodules.self_attention.submodules
        shared = transformer.context_parallel_size > 1  # Transformer Engine would split the pack its own way
        attention.core_attention = PackedCausalAttention if shared else TransformerEngineAttention
        return spec
    spec = get_gpt_layer_local_spec(
        num_experts=transformer.num_moe_experts,
        normalization="RMSNorm",
        qk_layernorm=shape.family.qk_norm,
    )
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedCausalAttention
    if shape.family.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if config.model.lora.rank:
        adapt_spec(spec, config.model.lora)
    sums = _rounds_as_sglang(config)
    if sums:
        sum_in_float32(spec)
    layers = get_num_layers_to_build(transformer, chunk)
    return TransformerBlockSubmodules([spec] * layers, layer_norm=SumNorm if sums else Norm)


def has_float32_head(config: RunConfig, dtype: torch.dtype) -> bool:
    """Whether the output layer's products of bfloat16 are float32."""
    return config.model.float32_head and dtype is torch.bfloat16


def build_chunks(transformer: TransformerConfig, shape: ModelShape, config: RunConfig) -> list[GPTModel]:
    """This rank's parts of the model, see chunks.py."""
    numbers = [None] if config.trainer.virtual_stages == 1 else range(config.trainer.virtual_stages)
    return [build_gpt(transformer, shape, config, number) for number in numbers]


def build_gpt(
    transformer: TransformerConfig, shape: ModelShape, config: RunConfig, chunk: int | None = None
) -> GPTModel:
    """This rank's part of the model, or a chunk of it, its weights yet to be loaded. It has no RoPE of its
    own: trainer/megatron/rope.py's is used."""
    gpt = GPTModel(
        transformer,
        _block_spec(transformer, shape, config, chunk),
        vocab_size=math.ceil(shape.vocab / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        position_embedding_type="none",
        share_embeddings_and_output_weights=shape.tied,
        parallel_output=True,
        vp_stage=chunk,
    )
    if not uses_transformer_engine(config):
        _finish_layers(gpt, config)
    elif derive(config).recompute_activations == "selective":
        _forget_fused(gpt)
    add_post_norms(gpt, shape)
    if gpt.pre_process and shape.family.scaled_embedding:
        gpt.embedding.register_forward_hook(lambda module, inputs, rows: rows * shape.hidden**0.5)
    if config.model.lora.rank:
        add_adapters(gpt, shape, config.model.lora)
    note_tensor_parallel(gpt)
    if gpt.post_process:
        takes_whole_packs(gpt.output_layer)
        if has_float32_head(config, transformer.params_dtype):
            float32_output(gpt.output_layer)
    return gpt


def _finish_layers(gpt: GPTModel, config: RunConfig) -> None:
    """What Megatron's own layers cannot be told by their spec."""
    forgetful = derive(config).recompute_activations == "selective"
    if isinstance(gpt.decoder.layers[0].input_layernorm, SumNorm):
        full = gpt.config.recompute_granularity == "full"  # then a layer's input is another tensor each time
        join_sums_and_norms(gpt.decoder, across_layers=not full)
    for layer in gpt.decoder.layers:
        qkv, mlp = layer.self_attention.linear_qkv, layer.mlp
        if gpt.config.add_qkv_bias and _rounds_as_sglang(config):
            bias_before_rounding(qkv)
        if forgetful:
            Forgetting(layer.input_layernorm, qkv)
        if isinstance(mlp, MLP):
            use_own_activation(mlp)
            if forgetful:
                Forgetting(layer.pre_mlp_layernorm, mlp.linear_fc1)
                Forgetting(mlp.activation_func, mlp.linear_fc2)


def _forget_fused(gpt: GPTModel) -> None:
    """Of Transformer Engine's layers what activations give is computed again in the backward pass. Its norms
    are parts of the linear layers behind them, which keep what they give."""
    for mlp in (layer.mlp for layer in gpt.decoder.layers if isinstance(layer.mlp, MLP)):
        use_own_activation(mlp)
        Forgetting(mlp.activation_func, mlp.linear_fc2)


def note_tensor_parallel(gpt: GPTModel) -> None:
    """What Megatron's initialization (0.16.1, tensor_parallel/layers.py) would note of each parameter, but we
    leave it out. Without the first note the gradient norm counts the first tensor-parallel rank's shards
    only; without the second a norm's gradient, a router's or an adapter's is that of this rank's share of the
    tokens."""
    for name, parameter in gpt.named_parameters():
        replicated = "norm" in name or is_router(name) or is_replicated(name)
        parameter.tensor_model_parallel = not replicated
        parameter.sequence_parallel = gpt.config.sequence_parallel and replicated


def takes_whole_packs(output_layer: ColumnParallelLinear) -> None:
    """Lets the output layer take all rows instead of this rank's share: the policy gathers the pack before it
    (`MegatronPolicy._keep_selected`), as the places that are asked for are not split evenly."""
    output_layer.sequence_parallel = False
    output_layer.allreduce_dgrad = output_layer.tp_group.size() > 1


def wrap(
    transformer: TransformerConfig, chunks: list[GPTModel], config: RunConfig
) -> list[DistributedDataParallel]:
    """Gradient buffers, summed over the data-parallel ranks in float32, each bucket as soon as its last
    micro-batch has given it; the distributed optimizer moves the parameters into buffers too.

    The parameters are gathered at once after an update, and not beside the next forward pass: their
    publication reads them then.
    """
    modules = [Float16Module(transformer, chunk) if transformer.bf16 else chunk for chunk in chunks]
    overlap = config.trainer.data_parallel * config.trainer.context_parallel > 1
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.trainer.distributed_optimizer,
        overlap_grad_reduce=overlap,
    )
    wrapped = [DistributedDataParallel(transformer, ddp, module) for module in modules]
    if overlap:
        waiting = [each.no_sync for each in wrapped]
        transformer.no_sync_func = waiting if len(waiting) > 1 else waiting[0]
    return wrapped


def build_optimizer(
    config: RunConfig, models: list[DistributedDataParallel], dtype: torch.dtype
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW, and its schedule: linear warm-up over optimizer.warmup_steps, then optimizer.schedule."""
    c = config.optimizer
    schedule = _schedule(config)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=c.lr,
            min_lr=schedule["min_lr"],
            weight_decay=c.weight_decay,
            adam_beta1=c.beta1,
            adam_beta2=c.beta2,
            adam_eps=c.eps,
            clip_grad=c.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.trainer.distributed_optimizer,
        ),
        models,
        use_gloo_process_groups=False,  # groups.py makes none
    )
    prime(optimizer)
    fuse(optimizer)
    # Also what keeps weight decay off norms and biases: Megatron multiplies a group's wd_mult in here and
    # nowhere else.
    scheduler = OptimizerParamScheduler(
        optimizer,
        wd_incr_steps=_FOREVER,
        wd_incr_style="constant",
        lr_wsd_decay_style="linear",
        **schedule,
    )
    return optimizer, scheduler


def _schedule(config: RunConfig) -> dict[str, Any]:
    """OptimizerParamScheduler's attributes for optimizer.schedule; it counts updates."""
    c, updates = config.optimizer, config.algorithm.minibatches_per_step
    warmup, falls = c.warmup_steps * updates, c.schedule != "constant"
    steps = config.steps if c.decay_steps is None else c.warmup_steps + c.decay_steps
    end = (config.steps if c.schedule == "wsd" else steps) * updates
    return {
        "init_lr": c.lr / (warmup + 1),
        "max_lr": c.lr,
        "min_lr": c.min_lr if falls else c.lr,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": end if falls else _FOREVER,
        "lr_decay_style": {"wsd": "WSD"}.get(c.schedule, c.schedule),
        "wsd_decay_steps": (c.decay_steps or 0) * updates,
        "start_wd": c.weight_decay,
        "end_wd": c.weight_decay,
    }


def apply_settings(
    config: RunConfig, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
) -> None:
    """The configuration's learning rate, schedule, weight decay, betas and epsilon, in place of those of the
    run that wrote a checkpoint, which its load brings."""
    c, schedule = config.optimizer, _schedule(config)
    for group in optimizer.param_groups:
        group.update(max_lr=c.lr, min_lr=schedule["min_lr"], betas=(c.beta1, c.beta2), eps=c.eps)
    for name, value in schedule.items():
        setattr(scheduler, name, value)
    scheduler.step(0)
