"""What Megatron's optimizers need so that torch's AdamW (used where neither apex nor Transformer Engine is
installed) can be saved and resumed.

Called by trainer/megatron/building.py and trainer/checkpoint.py. Without `prime`, an optimizer cannot be
saved before its first update; without `restore_step_0` what was saved before the first update cannot be
loaded; without `unshare_steps`, a loaded one silently counts its steps once per parameter, and Adam's bias
correction is wrong.
"""

from collections.abc import Iterator

import torch
from megatron.core.optimizer import MegatronOptimizer


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that Megatron has chained, or the one that there is."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _over_torch_adamw(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return [o for o in parts(optimizer) if isinstance(o.optimizer, torch.optim.AdamW)]


def prime(optimizer: MegatronOptimizer) -> None:
    """Gives every parameter the state that AdamW would make at its first update: step 0, zero moments."""
    for o in _over_torch_adamw(optimizer):
        for group in o.optimizer.param_groups:
            for p in group["params"]:
                o.optimizer.state[p] = {
                    "step": torch.zeros((), device=p.device),  # where the fused update wants it
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }


def fuse(optimizer: MegatronOptimizer) -> None:
    """Lets torch's AdamW update in one pass. Its default (torch/optim/optimizer.py,
    `_default_to_fused_or_foreach`) makes temporaries: on the CPU two of the size of a parameter, which with a
    large vocabulary is a gigabyte, and takes five times as long; on a GPU of the size of all parameters."""
    for o in _over_torch_adamw(optimizer):
        for group in o.optimizer.param_groups:
            group["fused"] = True


def restore_step_0(loaded: dict) -> None:
    """Before a load of what was saved before the first update: Megatron (0.16.1, optimizer/optimizer.py,
    `sharded_state_dict`) leaves a step of 0 out, without which AdamW cannot be loaded. Not for the
    distributed optimizer, which has it elsewhere."""
    states = [loaded] if {"state", "optimizer"} & loaded.keys() else loaded.values()
    for part in states:
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
    for i, o in enumerate(parts(optimizer)):
        for j, group in enumerate(o.optimizer.param_groups):
            for k, p in enumerate(group["params"]):
                yield f"{i}.{j}.{k}.param", p.detach()
                for name, value in sorted(o.optimizer.state[p].items()):
                    yield f"{i}.{j}.{k}.{name}", torch.as_tensor(value)
            if "step" in group and not isinstance(
                o.optimizer, torch.optim.AdamW
            ):  # fused Adams count here; in AdamW's it is a leftover of a load
                yield f"{i}.{j}.step", torch.as_tensor(group["step"])
