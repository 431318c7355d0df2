"""What Megatron's optimizers need so that torch's AdamW (used where neither apex nor Transformer Engine is
installed) can be saved and resumed.

Called by trainer/megatron/building.py and trainer/checkpoint.py. Without `prime`, an optimizer cannot be
saved before its first update, nor can the distributed one be loaded; without `restore_step_0` what was saved
before the first update cannot be loaded; without `unshare_steps`, a loaded one silently counts its steps once
per parameter, and Adam's bias correction is wrong. `prime` also mends how the distributed optimizer finds a
parameter in what it saves.
"""

from collections.abc import Iterator

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def _chained(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _over_torch_adamw(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return [o for o in _chained(optimizer) if isinstance(o.optimizer, torch.optim.AdamW)]


def prime(optimizer: MegatronOptimizer) -> None:
    """Gives every parameter the state that AdamW would make at its first update: step 0, zero moments."""
    for o in _chained(optimizer):
        if isinstance(o, DistributedOptimizer):
            _leave_out_padding(o)
    for o in _over_torch_adamw(optimizer):
        for group in o.optimizer.param_groups:
            for p in group["params"]:
                o.optimizer.state[p] = {
                    "step": torch.zeros((), device=p.device),  # where the fused update wants it
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        if isinstance(o, DistributedOptimizer):
            _let_steps_pass(o)


def fuse(optimizer: MegatronOptimizer) -> None:
    """Lets torch's AdamW update in one pass. Its default (torch/optim/optimizer.py,
    `_default_to_fused_or_foreach`) makes temporaries: on the CPU two of the size of a parameter, which with a
    large vocabulary is a gigabyte, and takes five times as long; on a GPU of the size of all parameters."""
    for o in _over_torch_adamw(optimizer):
        for group in o.optimizer.param_groups:
            group["fused"] = True


def _leave_out_padding(optimizer: DistributedOptimizer) -> None:
    """Megatron (0.16.1, optimizer/distrib_optimizer.py, `sharded_param_state_fully_reshardable`) saves a
    buffer's state without the padding behind each bucket, but looks a parameter up by its place with it:
    wrong when a buffer has several buckets, as that of a tied embedding under pipeline parallelism has. After
    the construction only saving asks."""
    for buffer in optimizer.buffers:
        padding = [0]
        for bucket in buffer.buckets:
            padding.append(padding[-1] + bucket.grad_data.numel() - bucket.numel_unpadded)
        buffer.param_index_map = {
            p: (a - padding[i], b - padding[i], i) for p, (a, b, i) in buffer.param_index_map.items()
        }


def _let_steps_pass(optimizer: DistributedOptimizer) -> None:
    """Megatron (0.16.1, optimizer/distrib_optimizer.py, `_set_main_param_and_optimizer_states`) restores a
    parameter's state from its moments alone, then asks for "step" too; hand it the step that it has restored
    before."""
    put = optimizer._set_main_param_and_optimizer_states

    def put_with_step(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = optimizer.model_param_group_index_map[parameter]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
        put(parameter, {"step": state["step"].clone(), **tensors})

    optimizer._set_main_param_and_optimizer_states = put_with_step


def restore_step_0(loaded: dict) -> None:
    """Before a load of what was saved before the first update: Megatron (0.16.1, optimizer/optimizer.py,
    `sharded_state_dict`) leaves a step of 0 out, without which AdamW cannot be loaded. Not for the
    distributed optimizer, which has it elsewhere."""
    parts = [loaded] if {"state", "optimizer"} & loaded.keys() else loaded.values()
    for part in parts:
        part.get("optimizer", part)["state"].setdefault("common_step", torch.tensor(0.0))


def unshare_steps(optimizer: MegatronOptimizer) -> None:
    """After a load: Megatron puts one step tensor into every parameter's state, and AdamW would count it up
    once per parameter; its fused update wants each beside its parameter."""
    for o in _over_torch_adamw(optimizer):
        for parameter, state in o.optimizer.state.items():
            state["step"] = state["step"].clone().to(parameter.device)


def named_state(optimizer: MegatronOptimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the optimizer: the parameters that it updates (master weights or shards) and their
    moments and steps, in a fixed order."""
    for i, o in enumerate(_chained(optimizer)):
        for j, group in enumerate(o.optimizer.param_groups):
            for k, p in enumerate(group["params"]):
                yield f"{i}.{j}.{k}.param", p.detach()
                for name, value in sorted(o.optimizer.state[p].items()):
                    yield f"{i}.{j}.{k}.{name}", torch.as_tensor(value)
            if "step" in group and not isinstance(
                o.optimizer, torch.optim.AdamW
            ):  # fused Adams count here; in AdamW's it is a leftover of a load
                yield f"{i}.{j}.step", torch.as_tensor(group["step"])
