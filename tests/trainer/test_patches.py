"""Every patch of a foreign package is still needed: without it the package does what the patch is there for.

A test that fails here after an upgrade names a patch to be deleted.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.extensions import transformer_engine
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.optim.optimizer import _default_to_fused_or_foreach

from helpers.trainer import tiny
from laminar_hpc.store.checkpoints import DamagedCheckpoint
from laminar_hpc.trainer.checkpoint import Checkpointer
from laminar_hpc.trainer.checkpointing import live_state
from laminar_hpc.trainer.megatron import adam, building, cpu, optimizer_shards
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.megatron.residual import Norm
from laminar_hpc.trainer.step.learner import Learner

pytestmark = pytest.mark.usefixtures("world")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing where CUDA is")


def trained(model: Path, run_dir: Path, steps: int = 1, **settings: object) -> Checkpointer:
    """A policy after `steps` updates."""
    policy = MegatronPolicy(tiny.make_config(model, **settings))
    learner = Learner(policy.config, policy)
    for step in range(steps):
        learner.train(tiny.step_batch(tiny.make_batch(seed=step)), step, lambda: None)
    return Checkpointer(run_dir, policy, learner)


def nothing(*_: object) -> None: ...


def test_an_unprimed_adam_cannot_be_saved_before_its_first_update(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """adam.prime: AdamW has no state before its first update, and Megatron cannot save none."""
    monkeypatch.setattr(building, "prime", nothing)
    with pytest.raises((KeyError, AssertionError, ValueError, RuntimeError)):
        trained(tied_model, tmp_path, steps=0, trainer__distributed_optimizer=True).save(0)


def test_an_adam_saved_before_its_first_update_cannot_be_loaded(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """adam.restore_step_0: Megatron leaves a step of 0 out of what it saves."""
    monkeypatch.setattr(optimizer_shards, "restore_step_0", nothing)
    checkpointer = trained(tied_model, tmp_path, steps=0)
    checkpointer.save(0)
    with pytest.raises(DamagedCheckpoint, match="KeyError: 'step'"):
        checkpointer.load(0)


def test_a_loaded_adam_shares_one_step(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """adam.unshare_steps: one tensor counts the steps of all parameters, once per parameter."""
    monkeypatch.setattr(live_state, "unshare_steps", nothing)
    shared = []
    for number, distributed in enumerate((False, True)):
        settings = {"trainer__distributed_optimizer": distributed}
        checkpointer = trained(tied_model, tmp_path / str(number), **settings)
        checkpointer.save(1)
        checkpointer.load(1)
        for one in adam._over_torch_adamw(checkpointer._policy.optimizer):
            steps = [state["step"].data_ptr() for state in one.optimizer.state.values()]
            shared.append(len(set(steps)) < len(steps))
    assert any(shared)


def test_adam_is_not_fused_on_the_cpu_by_itself() -> None:
    """adam.fuse: torch's default there is the loop over parameters."""
    assert _default_to_fused_or_foreach([torch.zeros(2)], differentiable=False) == (False, False)


def test_every_adam_is_fused_also_after_a_load(tied_model: Path, tmp_path: Path) -> None:
    """adam.fuse and adam.prime: one pass without temporaries of the size of all parameters, for which each
    step must be on its parameter's device; a checkpoint brings the settings of the run that wrote it."""
    checkpointer = trained(tied_model, tmp_path)
    (adamw,) = (one.optimizer for one in adam._over_torch_adamw(checkpointer._policy.optimizer))
    for group in adamw.param_groups:
        group["fused"] = None
    checkpointer.save(1)
    checkpointer.load(1)
    assert all(group["fused"] for group in adamw.param_groups)
    elsewhere = torch.optim.AdamW([torch.nn.Parameter(torch.empty(3, device="meta"))])
    adam.prime(SimpleNamespace(optimizer=elsewhere))
    (state,) = elsewhere.state.values()
    assert {tensor.device.type for tensor in state.values()} == {"meta"}


def test_an_uninitialized_model_does_not_say_what_is_tensor_parallel(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """building.note_tensor_parallel: with perform_initialization=False Megatron leaves the note out."""
    monkeypatch.setattr(building, "note_tensor_parallel", nothing)
    gpt = MegatronPolicy(tiny.make_config(tied_model)).gpt
    split = {name: p for name, p in gpt.named_parameters() if "norm" not in name}
    unnoted = [name for name, p in split.items() if not getattr(p, "tensor_model_parallel", False)]
    assert unnoted, unnoted


def test_megatrons_own_writer_starts_processes(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """checkpoint_writer.py: even with one thread Megatron asks for a manager or a fork."""

    class Started(Exception): ...

    def start(method: str) -> None:
        raise Started(method)

    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    monkeypatch.setattr(filesystem_async.mp, "get_context", start)
    checkpointer = trained(tied_model, tmp_path, steps=0)
    (tmp_path / "megatron").mkdir()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    with pytest.raises(Started), cpu.cuda_as_cpu():
        dist_checkpointing.save(checkpointer._live.sharded(False), str(tmp_path / "megatron"), strategy)


def test_megatrons_own_attention_takes_no_packs(tied_model: Path) -> None:
    """attention.PackedCausalAttention: DotProductAttention refuses packed sequences."""
    policy = MegatronPolicy(tiny.make_config(tied_model))
    own = policy.gpt.decoder.layers[0].self_attention.core_attention
    with cpu.cuda_as_cpu():
        megatrons = DotProductAttention(policy.transformer, 1, own, "self")
    x = torch.zeros(3, 1, 4, 8)
    with pytest.raises(AssertionError, match="Packed sequence is not supported"):
        megatrons(x, x, x, None, packed_seq_params=PackedSeqParams(qkv_format="thd"))


def test_megatrons_own_norm_refuses_sequence_parallelism() -> None:
    """residual.Norm: the one that Megatron's local layers have cannot be built with it."""
    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "normalization": "RMSNorm"}
    config = TransformerConfig(**shape, tensor_model_parallel_size=2, sequence_parallel=True)
    with pytest.raises(AssertionError, match="sequence parallel not supported"):
        WrappedTorchNorm(config, 8)
    Norm(config, 8, 1e-6)


def test_transformer_engine_gets_megatrons_fields_alone() -> None:
    """te_attention.TransformerEngineAttention: a PackLayout may be handed on as it is, because its own fields
    are left out."""
    source = inspect.getsource(transformer_engine)
    assert re.search(
        r"kept_packed_seq_params = set\(\s*field.name for field in dataclasses.fields\(Packed", source
    )
    assert "getattr(packed_seq_params, key) for key in self.kept_packed_seq_params" in source


def test_megatron_rounds_before_it_adds() -> None:
    """residual.sum_in_float32: a residual sum of bfloat16 models is rounded before it is normalized."""
    added = get_bias_dropout_add(False, False)(
        (torch.ones(2, dtype=torch.bfloat16), None), torch.full((2,), 1.001), 0.0
    )
    assert added.dtype is torch.bfloat16


def test_megatrons_layers_round_the_product(tied_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """linear.float32_output and bias_before_rounding: logits come in bfloat16, and a bias is added to a
    product that was rounded."""
    for name in ("float32_output", "bias_before_rounding"):
        monkeypatch.setattr(building, name, nothing)
    policy = MegatronPolicy(tiny.make_config(tied_model, model__dtype="bfloat16"))
    qkv, head = policy.gpt.decoder.layers[0].self_attention.linear_qkv, policy.gpt.output_layer
    x = torch.randn(64, 1, 32, dtype=torch.bfloat16)
    policy._selected = torch.arange(64)
    with torch.no_grad(), cpu.cuda_as_cpu():
        logits, _ = head(x, weight=policy.gpt.shared_embedding_or_output_weight())
        product, _ = qkv(x)
        once = torch.nn.functional.linear(x, qkv.weight, qkv.bias)
    assert logits.dtype is torch.bfloat16 and not torch.equal(product, once)


OF_EXPERTS = ("Stream", "current_stream", "stream", "maybe_move_tensor_to_cpu")  # of their dispatcher alone


def test_megatron_forgets_a_name_without_transformer_engine() -> None:
    """experts: the router reads te_general_gemm, which is nothing where Transformer Engine is missing."""
    source = inspect.getsource(moe_utils)
    assert "te_general_gemm is not None" in source and "te_general_gemm = None" not in source


@on_cpu
@pytest.mark.parametrize("name", [name for _, name, _ in cpu.REPLACED])
def test_megatron_calls_cuda(
    name: str, tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cpu.REPLACED: each of these functions is called in building, training with recomputed activations,
    saving and loading; without CUDA it would fail."""
    calls: list[str] = []
    replaced = tuple((module, each, counting(calls, each, value)) for module, each, value in cpu.REPLACED)
    monkeypatch.setattr(cpu, "REPLACED", replaced)
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None)
    settings = {"trainer__distributed_optimizer": True, "trainer__recompute_activations": "full"}
    mixture = tiny.make_model(tmp_path / "mixture", **tiny.EXPERTS["qwen3-moe"])
    checkpointer = trained(mixture if name in OF_EXPERTS else tied_model, tmp_path, **settings)
    checkpointer.save(1)
    checkpointer.load(1)
    if "torch.cuda.synchronize()" in inspect.getsource(FullyParallelLoadStrategyWrapper.load):
        calls.append("synchronize")  # of several data-parallel ranks without the distributed optimizer
    assert name in calls


def counting(calls: list[str], name: str, value: Callable) -> Callable:
    def call(*args: object, **keywords: object) -> object:
        calls.append(name)
        return value(*args, **keywords)

    return call
