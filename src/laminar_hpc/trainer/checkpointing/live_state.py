"""A trainer rank's state, as it is in the running process: what a checkpoint holds of it, and how it comes
back. Used by trainer/checkpoint.py.
"""

import hashlib
import json
from collections.abc import Mapping, Set
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

from laminar_hpc.trainer.megatron.adam import fuse, named_state, unshare_steps
from laminar_hpc.trainer.megatron.optimizer_shards import load_sharded_state, sharded_state
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.rescoring import Beside

BESIDE = ("reference", "critic")  # what may be there


class LiveState:
    """Weights, optimizer, schedule, random generators, and what is `beside` them, by name. `sharded` and
    `load` are collective. Where `those` are named, the others beside them are left out."""

    def __init__(self, policy: MegatronPolicy, beside: Mapping[str, Beside] | None = None) -> None:
        self._policy = policy
        self._beside = dict(beside or {})

    @property
    def beside(self) -> set[str]:
        """Names of what a checkpoint of it has beside the policy."""
        return set(self._beside)

    def _parts(self, those: Set[str] | None) -> dict[str, Beside]:
        return {n: part for n, part in self._beside.items() if those is None or n in those}

    def sharded(self, loading: bool, those: Set[str] | None = None) -> dict:
        """What is in megatron/, for `dist_checkpointing.save` and `load`."""
        optimizer = sharded_state(self._policy.optimizer, self._policy.gpt, loading)
        state = {"optimizer": optimizer, "scheduler": self._policy.scheduler.state_dict()}
        return state | {name: part.sharded(loading) for name, part in self._parts(those).items()}

    def load(
        self, checkpoint: Path, with_random_states: bool, rng_file: str, those: Set[str] = frozenset()
    ) -> None:
        """Reads this rank's weights from hf/, its optimizer state from megatron/, and its random states."""
        policy, folder = self._policy, str(checkpoint / "megatron")
        strategy = get_default_load_sharded_strategy(folder)
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if replicas.size() > 1 and not policy.config.trainer.distributed_optimizer:
            strategy = FullyParallelLoadStrategyWrapper(strategy, replicas)  # each reads a part for all
        loaded = dist_checkpointing.load(self.sharded(loading=True, those=those), folder, strategy)
        policy.load_hf(checkpoint / "hf")
        for name, part in self._parts(those).items():
            part.take(loaded[name])
        take_optimizer(policy, loaded["optimizer"], loaded["scheduler"])
        if with_random_states:
            set_rng_state(torch.load(checkpoint / "rng" / rng_file, weights_only=True))

    def digest(self, those: Set[str] | None = None) -> bytes:
        """SHA-256 over all of it."""
        found = hashlib.sha256()
        tensors = {f"model.{name}": p.detach() for name, p in self._policy.gpt.named_parameters()}
        tensors |= {f"optimizer.{name}": t for name, t in named_state(self._policy.optimizer)}
        tensors |= {f"rng.{name}": t for name, t in rng_state().items()}
        for of, part in self._parts(those).items():
            tensors |= {f"{of}.{name}": t for name, t in part.tensors().items()}
        for name in sorted(tensors):
            found.update(name.encode())
            found.update(tensors[name].cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        found.update(json.dumps(self._policy.scheduler.state_dict(), sort_keys=True).encode())
        return found.digest()


def take_optimizer(policy: MegatronPolicy, optimizer: dict, scheduler: dict) -> None:
    """The optimizer's state and its schedule, as loaded. A load brings the settings of what was saved."""
    load_sharded_state(policy.optimizer, optimizer)
    policy.scheduler.num_steps = 0  # loading counts on from here
    policy.scheduler.load_state_dict(scheduler)
    unshare_steps(policy.optimizer)
    fuse(policy.optimizer)


def rng_state() -> dict[str, torch.Tensor]:
    """The random generators of this process: torch's, the GPU's, and Megatron's named streams. Python's and
    numpy's are not drawn from."""
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state | {
        f"stream.{name}": value for name, value in tensor_parallel.get_cuda_rng_tracker().get_states().items()
    }


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Restores what `rng_state` gave: torch, CUDA and the tensor-parallel streams."""
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(
        {n.removeprefix("stream."): s for n, s in state.items() if n.startswith("stream.")}
    )
