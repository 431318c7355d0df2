"""All that is hooked into SGLang, in one table. SGLang's own registry applies the hooks; its files stay
untouched. The lines cited are those of SGLang 0.5.21; tests/rollout/test_hooks.py fails where SGLang no
longer does what a hook is for."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from laminar_hpc.engine.sglang.plugin import adapters, columns, kv_cache, port, protocol, routes
from laminar_hpc.machine.compat.optional import leave_out


@dataclass(frozen=True)
class Hook:
    """`kind` is the name of one of SGLang's HookType: when `function` runs relative to its target."""

    module: str
    name: str
    kind: str
    function: Callable[..., Any]

    @property
    def target(self) -> str:
        """Returns the name that SGLang's registry has for it."""
        return f"{self.module}.{self.name}"


SCHEDULER = "sglang.srt.managers.scheduler"
PORT_HOOKS = (
    # scheduler.py:2079: the only place that each turn passes in the scheduler's thread, idle or not
    Hook(SCHEDULER, "Scheduler.process_input_requests", "BEFORE", port.before_requests),
    # request_receiver.py:119: what it returns is given to all tensor-parallel ranks (:211), our orders too
    Hook(port.RECEIVER, "SchedulerRequestReceiver._pull_raw_reqs", "AROUND", port.before_broadcast),
    # scheduler.py:5187 clears the KV pool, into which threads of moves may still write
    Hook(SCHEDULER, "Scheduler.flush_cache", "BEFORE", port.before_flush),
    # invariant_checker.py:507 takes pages that a move has reserved for a leak
    Hook(
        "sglang.srt.managers.scheduler_components.invariant_checker",
        "SchedulerInvariantChecker._check_all_pools",
        "AROUND",
        kv_cache.account,
    ),
    # batch_result_processor.py:135 reads the slots of a request's last prefill, in four bytes per expert
    Hook(
        "sglang.srt.managers.scheduler_components.batch_result_processor",
        "SchedulerBatchResultProcessor._maybe_collect_routed_experts",
        "AROUND",
        routes.collect,
    ),
    # models/mixtral.py:91 makes routers that do not know their layer
    Hook(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner.init_routed_experts_capturer",
        "BEFORE",
        routes.number_layers,
    ),
    # schedule_batch.py:2268 frees the slots of a request that is to be prefilled again
    Hook("sglang.srt.managers.schedule_batch", "release_req", "BEFORE", routes.keep_retracted),
    # load_snapshot.py:299 names a file in /dev/shm, which outlives a killed engine
    Hook("sglang.srt.managers.load_snapshot", "shm_path_for", "REPLACE", port.load_snapshot_path),
    # lora_manager.py:438 ends the scheduler where an adapter is not there
    Hook(SCHEDULER, "Scheduler.handle_generate_request", "AROUND", adapters.only_loaded),
    # output_streamer.py:520 and scheduler.py:6122 know one name of weights, not the adapters'
    Hook(
        "sglang.srt.managers.scheduler_components.output_streamer",
        "_GenerationStreamAccumulator.accept",
        "AROUND",
        adapters.report,
    ),
    Hook(SCHEDULER, "_make_abort_req", "AROUND", adapters.report_abort),
)
TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager"
REPLY_HOOKS = (  # of the HTTP server's process only
    # tokenizer_manager.py:2921 makes a list for each token, which takes 40 bytes of JSON
    Hook(TOKENIZER_MANAGER, "TokenizerManager.convert_logprob_style", "AROUND", columns.collect),
    # tokenizer_manager.py:3410: the reply to a request that was aborted comes by here only
    Hook(TOKENIZER_MANAGER, "TokenizerManager.add_logprob_to_meta_info", "AROUND", columns.show),
)


def deterministic_hooks(on_cpu: bool) -> tuple[Hook, ...]:
    """What model.deterministic needs beside SGLang's own --enable-deterministic-inference."""
    from laminar_hpc.engine.sglang.plugin import batch_invariance

    sampler = "sglang.srt.layers.sampler"
    # sampler.py:776 sorts a batch's rows before it draws
    name = "top_k_top_p_min_p_sampling_from_probs_torch"
    mixed = (Hook(sampler, name, "AROUND", batch_invariance.draw_or_take_best),)
    if not on_cpu:
        return mixed
    return (
        *mixed,
        # murmur_hash.py:127 imports sgl_kernel
        Hook(sampler, "sampling_from_probs_torch", "REPLACE", batch_invariance.draw),
        # batch_invariant_ops.py has Triton kernels
        Hook(
            "sglang.srt.model_executor.model_runner",
            "ModelRunner.maybe_enable_batch_invariant_mode",
            "REPLACE",
            batch_invariance.install,
        ),
    )


def cpu_hooks(deterministic: bool = False) -> tuple[Hook, ...]:
    """What an engine on the CPU needs, or is faster with; none changes a number but by rounding."""
    from laminar_hpc.engine.sglang.plugin import attention, batch_invariance, cpu_functions, cpu_layers

    own = batch_invariance.FixedOrderAttention if deterministic else attention.BatchedAttention
    return (
        *_cpu_lora_hooks(),
        *_speculation_hooks(),
        # engine.py:1890: each process would import everything anew
        Hook("sglang.srt.entrypoints.engine", "_set_envs_and_config", "AFTER", cpu_functions.fork_children),
        # update_config.py:277 pads the model for kernels that are not used here
        Hook(
            "sglang.srt.configs.update_config",
            "adjust_config_with_unaligned_cpu_tp",
            "REPLACE",
            cpu_functions.leave_shape,
        ),
        # torch_native_backend.py:108 and 216 walk over the requests in Python
        Hook(
            "sglang.srt.layers.attention.torch_native_backend",
            "TorchNativeAttnBackend",
            "REPLACE",
            own,
        ),
        # rotary_embedding/base.py:279 cuts, rotates and joins query and key apart
        Hook(
            "sglang.srt.layers.rotary_embedding.base",
            "RotaryEmbedding.forward_native",
            "AROUND",
            cpu_functions.rotate,
        ),
        # allocation.py:706 starts a Triton kernel
        Hook(
            "sglang.srt.mem_cache.allocation",
            "assign_req_to_token_pool_func",
            "REPLACE",
            cpu_functions.assign_slots,
        ),
        # pool_host/common.py:250 registers host memory with CUDA
        Hook(
            "sglang.srt.mem_cache.pool_host.common",
            "alloc_with_host_register",
            "REPLACE",
            cpu_functions.plain_memory,
        ),
        # moe/fused_moe_native.py:79 counts by the experts' numbers, of which others' are -1
        Hook(
            "sglang.srt.layers.moe.fused_moe_native",
            "moe_forward_native",
            "AROUND",
            cpu_functions.experts_here,
        ),
        # models/qwen2_moe.py:881 calls this triton kernel
        Hook(
            "sglang.kernels.ops.elementwise.elementwise",
            "fused_gate_sigmoid_mul_add",
            "REPLACE",
            cpu_functions.add_gated,
        ),
        # models/qwen2.py:297 calls a dozen nested modules per layer
        Hook("sglang.srt.models.qwen2", "Qwen2DecoderLayer.forward", "AROUND", cpu_layers.decoder_layer),
    )


def _speculation_hooks() -> tuple[Hook, ...]:
    """Of functions that only a speculating engine calls."""
    from laminar_hpc.engine.sglang.plugin import plain_steps

    processor = "sglang.srt.managers.scheduler_components.batch_result_processor"
    return (
        # eagle_utils.py:1063 takes a slot for each request in each step
        Hook("sglang.srt.speculative.eagle_utils", "eagle_prepare_for_decode", "AROUND", plain_steps.reserve),
        # schedule_batch.py:3267 walks over the requests for what that takes
        Hook(
            "sglang.srt.managers.schedule_batch",
            "ScheduleBatch._new_tokens_required_next_decode_spec_v2",
            "AROUND",
            plain_steps.needed,
        ),
        # scheduler.py:4313 notes and restores all of a batch's fields
        Hook(SCHEDULER, "Scheduler._forward_isolation", "AROUND", plain_steps.isolated),
        # batch_result_processor.py:789 walks over the requests for the drafts that were right
        Hook(processor, "SchedulerBatchResultProcessor._resolve_spec_v2_tokens", "AROUND", plain_steps.taken),
    )


def _cpu_lora_hooks() -> tuple[Hook, ...]:
    from laminar_hpc.engine.sglang.plugin import cpu_lora

    backend = "sglang.srt.lora.backend.torch_backend"
    return (
        # lora/layers.py:471, 574, 701 and 789 pin memory, which ends an engine without an accelerator
        Hook("sglang.srt.lora.lora_manager", "LoRAManager.init_state", "AROUND", cpu_lora.without_pinning),
        # lora/backend/torch_backend.py:225 to 244 does, and walks over the requests in Python
        Hook(backend, "TorchNativeLoRABackend", "REPLACE", cpu_lora.CpuLoraBackend),
    )


def register() -> None:
    """Entry point, called in each of SGLang's processes. Nothing is hooked unless the environment names the
    port's socket: a plain SGLang is left alone."""
    if not os.environ.get(protocol.SOCKET_VARIABLE):
        return
    # debug_utils/dumper.py:1824 would import it, and Weights & Biases with it, in every scheduler
    leave_out("megatron")
    on_cpu = not torch.cuda.is_available()
    deterministic = os.environ.get(protocol.DETERMINISTIC_VARIABLE) == "1"
    hooks = (*PORT_HOOKS, *cpu_hooks(deterministic)) if on_cpu else PORT_HOOKS
    if deterministic:
        hooks = (*hooks, *deterministic_hooks(on_cpu))
    if deterministic and on_cpu:
        from laminar_hpc.engine.sglang.plugin import batch_invariance

        batch_invariance.allow_torch_native()
    for hook in hooks:
        _register(hook)


def register_in_server() -> None:
    """Called first by serve.py in the HTTP server; in a scheduler it would import half a server."""
    for hook in REPLY_HOOKS:
        _register(hook)


def _register(hook: Hook) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
