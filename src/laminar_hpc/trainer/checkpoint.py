"""Checkpoints: run_dir/checkpoints/step_000020/{hf/, megatron/, rng/, state.json}, written whole or not at
all, resumed bit for bit.

Called by trainer/loop.py on every rank. `hf/` is a Hugging Face directory with the weights, `megatron/`
Megatron's own format (torch_dist) with the optimizer, readable at other parallel layouts. Several machines
need run_dir on a common file system. Every wait is bounded.
"""

import hashlib
import json
import os
import shutil
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from torch.distributed.checkpoint.api import CheckpointException

from laminar_hpc.cluster.checkpoints import STATE_FILE, checkpoint_path, prune, read_state
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.trainer.megatron.adam import named_state, unshare_steps
from laminar_hpc.trainer.megatron.checkpoint_writer import in_process_strategy
from laminar_hpc.trainer.megatron.cpu import cuda_as_cpu
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner


class Checkpointer:
    """Saves and loads the state of one run's trainer. Collective: every rank of the trainer world makes the
    same calls in the same order."""

    def __init__(self, run_dir: Path, policy: MegatronPolicy, learner: Learner) -> None:
        self._run_dir, self._policy, self._learner = Path(run_dir), policy, learner
        self._rank, self._config = dist.get_rank(), policy.config
        self._timeout = timedelta(seconds=self._config.cluster.join_timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=self._timeout)

    def save(self, step: int) -> tuple[Path, str]:
        """Writes the checkpoint of `step` and deletes those beyond checkpoint.keep; returns its path and
        state hash.

        It appears under its name only when every rank has written its part. Raises LaminarError naming the
        ranks that did not come.
        """
        target = checkpoint_path(self._run_dir, step)
        partial = target.with_name(f".{target.name}")
        if self._rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            for folder in ("megatron", "rng"):
                (partial / folder).mkdir(parents=True)
        self._meet(f"the folder of checkpoint {target}")
        if not (partial / "rng").is_dir():
            raise LaminarError(
                f"trainer {self._rank} does not see {partial}: "
                "run_dir must be on a file system that all trainers share"
            )
        with cuda_as_cpu():
            dist_checkpointing.save(
                self._sharded_state(loading=False), str(partial / "megatron"), in_process_strategy()
            )
        torch.save(rng_state(), partial / "rng" / f"{self._rank:05d}.pt")
        state_hash = self.state_hash()
        self._policy.save_hf(partial / "hf")
        self._meet(f"checkpoint {target}")
        if self._rank == 0:
            state = {"step": step, "state_hash": state_hash, **self._layout()}
            state["skipped_in_a_row"] = self._learner.skipped_in_a_row
            _write_synced(partial / STATE_FILE, json.dumps(state, indent=2) + "\n")
            if target.exists():  # of an earlier launch that went on from an older checkpoint
                target.rename(target.with_name(f".old_{target.name}"))
            partial.rename(target)
            prune(self._run_dir, self._config.checkpoint.keep)
        return target, state_hash

    def load(self, step: int) -> None:
        """Restores weights, optimizer, schedule and random states. At the layout that it was saved with, the
        result is bit-exact: its hash is compared. Raises LaminarError when there is no such checkpoint, or
        when it is damaged."""
        path = checkpoint_path(self._run_dir, step)
        if not (path / STATE_FILE).is_file():
            raise LaminarError(
                f"there is no complete checkpoint {path}; every trainer "
                "machine must see run_dir, or start anew with resume=never"
            )
        state, mine = read_state(path), self._layout()
        # the one keeps its parameters as state, the other does not
        if state["distributed_optimizer"] != mine["distributed_optimizer"]:
            raise LaminarError(
                f"{path} was saved with "
                f"trainer.distributed_optimizer={str(state['distributed_optimizer']).lower()}; "
                "go on with that, the tensor, pipeline and data parallelism may be others"
            )
        with cuda_as_cpu():
            loaded = self._read(path)
            self._policy.gpt.load_state_dict(loaded["model"])
            self._policy.optimizer.load_state_dict(loaded["optimizer"])
            self._policy.scheduler.num_steps = 0  # loading counts on from here
            self._policy.scheduler.load_state_dict(loaded["scheduler"])
        unshare_steps(self._policy.optimizer)
        self._learner.skipped_in_a_row = state["skipped_in_a_row"]
        if {key: state[key] for key in mine} != mine:
            return  # another number of ranks: other random streams, other shards to hash
        set_rng_state(torch.load(path / "rng" / f"{self._rank:05d}.pt", weights_only=True))
        state_hash = self.state_hash()
        if state_hash != state["state_hash"]:
            raise LaminarError(
                f"{path} is damaged: its state hash is {state_hash[:12]}, not {state['state_hash'][:12]}; "
                "delete the folder to go on from the one before"
            )

    def _read(self, path: Path) -> dict:
        try:
            return dist_checkpointing.load(self._sharded_state(loading=True), str(path / "megatron"))
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            reason = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
            )
            raise LaminarError(
                f"{path} is damaged and cannot be read ({reason}); "
                "delete the folder to go on from the one before"
            ) from error

    def state_hash(self) -> str:
        """SHA-256 over every rank's weights, optimizer tensors, schedule and random states, in the order of
        the ranks. Equal on all ranks."""
        mine = hashlib.sha256()
        tensors = {f"model.{name}": p.detach() for name, p in self._policy.gpt.named_parameters()}
        tensors |= {f"optimizer.{name}": t for name, t in named_state(self._policy.optimizer)}
        tensors |= {f"rng.{name}": t for name, t in rng_state().items()}
        for name in sorted(tensors):
            mine.update(name.encode())
            mine.update(tensors[name].cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        mine.update(json.dumps(self._policy.scheduler.state_dict(), sort_keys=True).encode())
        own = torch.frombuffer(bytearray(mine.digest()), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own, group=self._group)
        return hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()

    def _sharded_state(self, loading: bool) -> dict:
        metadata = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "distrib_optim_sharding_type": "fully_reshardable",
        }
        model = self._policy.gpt.sharded_state_dict(metadata=metadata)
        optimizer = self._policy.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer, "scheduler": self._policy.scheduler.state_dict()}

    def _layout(self) -> dict:
        t = self._config.trainer
        return {
            "tensor_parallel": t.tensor_parallel,
            "pipeline_parallel": t.pipeline_parallel,
            "data_parallel": t.data_parallel,
            "distributed_optimizer": t.distributed_optimizer,
        }

    def _meet(self, what: str) -> None:
        """All ranks, within the time limit."""
        try:
            dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise LaminarError(
                f"trainer {self._rank} waited {self._timeout.seconds} s for the other trainer ranks at "
                f"{what}: {str(error).splitlines()[0]}"
            ) from None


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


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
