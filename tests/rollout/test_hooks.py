"""Each hook into a foreign package is still needed: what it is for still stands in the installed source.

A failure here after an upgrade means: look at the cited lines again, and remove the hook if it can go.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laminar_hpc.engine.sglang.plugin.platform import activate
from laminar_hpc.engine.sglang.process import EngineProcess
from laminar_hpc.machine.compat import torchvision

activate()  # before SGLang is imported, as its own processes do

from laminar_hpc.engine.sglang.plugin import hooks  # noqa: E402

# what is hooked -> where its reason stands: module, definition, a piece of its source
NEEDED_FOR = {
    "Scheduler.process_input_requests": (
        "sglang.srt.managers.scheduler",
        "Scheduler",
        "self.process_input_requests(recv_reqs)",
    ),
    "SchedulerRequestReceiver._pull_raw_reqs": (
        "sglang.srt.managers.scheduler_components.request_receiver",
        "SchedulerRequestReceiver",
        "recv_reqs = self._broadcast_reqs_across_ranks(recv_reqs, local_reqs)",
    ),
    "Scheduler.flush_cache": (
        "sglang.srt.managers.scheduler",
        "Scheduler.flush_cache",
        "self.token_to_kv_pool_allocator.clear()",
    ),
    "SchedulerInvariantChecker._check_all_pools": (
        "sglang.srt.managers.scheduler_components.invariant_checker",
        "SchedulerInvariantChecker._check_all_pools",
        "self._check_full_pool(ps, uncached=uncached)",
    ),
    "SchedulerBatchResultProcessor._maybe_collect_routed_experts": (
        "sglang.srt.managers.scheduler_components.batch_result_processor",
        "SchedulerBatchResultProcessor._maybe_collect_routed_experts",
        "req.routed_experts = capturer.get_topk(",
    ),
    "ModelRunner.init_routed_experts_capturer": (
        "sglang.srt.models.mixtral",
        "MixtralMoE",
        "renormalize=True,\n        )",
    ),
    "release_req": ("sglang.srt.managers.schedule_batch", "release_req", "req.reset_for_retract()"),
    "assign_req_to_token_pool_func": (
        "sglang.srt.mem_cache.allocation",
        "assign_req_to_token_pool_func",
        "assign_req_to_token_pool[(batch_size,)](",
    ),
    "alloc_with_host_register": (
        "sglang.srt.mem_cache.pool_host.common",
        "alloc_with_host_register",
        "_cuda_host_register(buffer, registration_granularity_bytes)",
    ),
    "TokenizerManager.convert_logprob_style": (
        "sglang.srt.managers.tokenizer_manager",
        "TokenizerManager.detokenize_logprob_tokens",
        "(logprob, token_id, None)",
    ),
    "TokenizerManager.add_logprob_to_meta_info": (
        "sglang.srt.managers.tokenizer_manager",
        "TokenizerManager._handle_abort_req",
        "self.add_logprob_to_meta_info(",
    ),
    "shm_path_for": ("sglang.srt.managers.load_snapshot", "shm_path_for", '"/dev/shm/'),
    "_set_envs_and_config": (
        "sglang.srt.entrypoints.engine",
        "_set_envs_and_config",
        'set_start_method("spawn"',
    ),
    "adjust_config_with_unaligned_cpu_tp": (
        "sglang.srt.configs.update_config",
        "adjust_config_with_unaligned_cpu_tp",
        "intermediate_padding_size",
    ),
    "TorchNativeAttnBackend": (
        "sglang.srt.layers.attention.torch_native_backend",
        "TorchNativeAttnBackend._run_sdpa_forward_decode",
        "for seq_idx in range(",
    ),
    "RotaryEmbedding.forward_native": (
        "sglang.srt.layers.rotary_embedding.base",
        "RotaryEmbedding.forward_native",
        "torch.cat((query_rot, query_pass)",
    ),
    "moe_forward_native": (
        "sglang.srt.layers.moe.fused_moe_native",
        "moe_forward_native",
        "cnts.scatter_(1, topk_ids.to(torch.int64), 1)",
    ),
    "fused_gate_sigmoid_mul_add": (
        "sglang.srt.models.qwen2_moe",
        "Qwen2MoeSparseMoeBlock",
        "fused_gate_sigmoid_mul_add(",
    ),
    "Scheduler.handle_generate_request": (
        "sglang.srt.lora.lora_manager",
        "LoRAManager.validate_lora_batch",
        "assert lora_ref is not None",
    ),
    "_GenerationStreamAccumulator.accept": (
        "sglang.srt.managers.scheduler_components.output_streamer",
        "_GenerationStreamAccumulator.accept",
        "current_version=self.current_weight_version",
    ),
    "_make_abort_req": (
        "sglang.srt.managers.scheduler",
        "_make_abort_req",
        "current_version=get_serving().weight_version",
    ),
    "eagle_prepare_for_decode": (
        "sglang.srt.mem_cache.allocation",
        "alloc_for_spec_decode",
        "for req, nxt_kv_len in zip(reqs, nxt_kv_lens_list, strict=True):",
    ),
    "ScheduleBatch._new_tokens_required_next_decode_spec_v2": (
        "sglang.srt.managers.schedule_batch",
        "ScheduleBatch._new_tokens_required_next_decode_spec_v2",
        "ceil_align(nxt, page_size) - ceil_align(cur, page_size)",
    ),
    "Scheduler._forward_isolation": (
        "sglang.srt.managers.scheduler",
        "Scheduler._forward_isolation",
        "{f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}",
    ),
    "SchedulerBatchResultProcessor._resolve_spec_v2_tokens": (
        "sglang.srt.managers.scheduler_components.batch_result_processor",
        "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        "req.update_spec_correct_drafts_histogram(num_correct_drafts)",
    ),
    "LoRAManager.init_state": ("sglang.srt.lora.layers", "QKVParallelLinearWithLoRA", "pin_memory=True"),
    "TorchNativeLoRABackend": (
        "sglang.srt.lora.backend.torch_backend",
        "TorchNativeLoRABackend.prepare_lora_batch",
        "pin_memory=True",
    ),
    "Qwen2DecoderLayer.forward": (
        "sglang.srt.models.qwen2",
        "Qwen2DecoderLayer.forward",
        "self.post_attention_layernorm(",
    ),
    "top_k_top_p_min_p_sampling_from_probs_torch": (
        "sglang.srt.layers.sampler",
        "top_k_top_p_min_p_sampling_from_probs_torch",
        "sampled_index = multinomial_with_seed(logprobs, sampling_seed, positions)",
    ),
    "sampling_from_probs_torch": (
        "sglang.kernels.ops.sampling.murmur_hash",
        "murmur_hash32",
        "import sgl_kernel",
    ),
    "ModelRunner.maybe_enable_batch_invariant_mode": (
        "sglang.srt.model_executor.model_runner",
        "ModelRunner.maybe_enable_batch_invariant_mode",
        "enable_batch_invariant_mode()",
    ),
}
# the same for what is no hook of SGLang's registry, by the name of our function or setting
OTHER_REASONS = {
    "serve.leave_freeze_gc_to_us": (
        "sglang.srt.entrypoints.http_server",
        "_wait_and_warmup",
        "_freeze_gc_after_server_warmup(server_args)",
    ),
    "speculation.arguments": (
        "sglang.srt.speculative.eagle_utils",
        "_verify_uses_greedy",
        "return is_all_greedy or is_cpu",
    ),
    "speculation.TEXTS": (  # reach the scheduler's request as they were sent
        "sglang.srt.sampling.sampling_params",
        "SamplingParams",
        "custom_params: Optional[Dict[str, CustomParamValue]] = None",
    ),
    "kv_cache.moved_reason": (
        "sglang.srt.managers.schedule_batch",
        "Req.update_finish_state",
        "self.finished_reason = self.to_finish",
    ),
    "optional.leave_out('megatron')": ("sglang.srt.debug_utils.dumper", "", "from megatron.core import"),
    "kv_cache.served_weight_ids": (  # an adapter's id is the key of its KV
        "sglang.srt.managers.schedule_batch",
        "Req",
        ") + lora_id",
    ),
    "adapter_calls.naming": (  # a request may name an adapter that SGLang's registry does not have
        "sglang.srt.managers.tokenizer_manager",
        "TokenizerManager._validate_and_resolve_lora",
        "if not obj.lora_path:\n            return",
    ),
    "determinism.ATTENTION": (
        "sglang.srt.arg_groups.choices",
        "",
        'RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND = ["ascend", "fa3", "fa4", "triton"]',
    ),
    "deterministic.set_variables": (
        "megatron.core.extensions.transformer_engine",
        "",
        'os.getenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")',
    ),
    "process.MODEL_PACKAGE": (
        "sglang.srt.models.registry",
        "",
        "ModelRegistry._default_models_loaded = False",
    ),
}
READ_IN = {  # environment variables of the engine -> the module of SGLang that reads them
    "SGLANG_CPU_OMP_THREADS_BIND": "sglang.srt.utils.numa_utils",
    "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "sglang.srt.distributed.bootstrap",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang.srt.models.registry",
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "sglang.srt.layers.quantization.unquant",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "sglang.srt.layers.sampler",
    "SGLANG_ROPE_CACHE_FP32": "sglang.srt.layers.rotary_embedding.base",
    "SGLANG_TIMEOUT_KEEP_ALIVE": "sglang.srt.entrypoints.http_server",
}


ALL_HOOKS = (
    *hooks.PORT_HOOKS,
    *hooks.REPLY_HOOKS,
    *hooks.cpu_hooks(),
    *hooks.deterministic_hooks(on_cpu=True),
)


def source_of(module: str, name: str) -> str:
    """The source of a definition, or of the whole module; nothing is imported but parent packages."""
    root, _, rest = module.partition(".")
    spec = importlib.util.find_spec(root)
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0], *rest.split(".")).with_suffix(".py")
    text = path.read_text()
    node: ast.AST = ast.parse(text)
    for part in name.split(".") if name else ():
        node = next(n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == part)
    return ast.get_source_segment(text, node) or "" if name else text


def test_every_hook_has_a_reason():
    """A hook that is added without a line in this file is not tested to be needed."""
    assert {hook.name for hook in ALL_HOOKS} == NEEDED_FOR.keys()


@pytest.mark.parametrize("name", NEEDED_FOR)
def test_what_a_hook_is_for_still_stands(name):
    """The hook's target exists, and the source still does what the hook changes."""
    hook = next(h for h in ALL_HOOKS if h.name == name)
    assert source_of(hook.module, hook.name)
    module, where, piece = NEEDED_FOR[name]
    assert piece in source_of(module, where)


@pytest.mark.parametrize("name", OTHER_REASONS)
def test_what_a_trick_is_for_still_stands(name):
    """The same for settings and replacements outside SGLang's registry of hooks."""
    module, where, piece = OTHER_REASONS[name]
    assert piece in source_of(module, where)


def test_every_setting_of_the_environment_is_read(tmp_path):
    """A variable that SGLang has renamed would be ignored without a word."""
    process = EngineProcess("engine", tmp_path / "log", 1)
    process.folder = tmp_path
    ours = {name for name in process.environment() if name.startswith("SGLANG_") and name not in os.environ}
    assert ours <= READ_IN.keys()
    assert {name for name in ours if name not in source_of(READ_IN[name], "")} == set()


@pytest.mark.slow
def test_torchvision_needs_its_schemas():
    """Beside this build of torch `import torchvision` fails exactly where machine/compat/torchvision.py says
    so."""
    program = "import torch, torchvision"
    failed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode
    assert (torchvision._library is not None) == bool(failed)
