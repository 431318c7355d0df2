"""Checkpoints: run_dir/checkpoints/step_000020/{hf/, megatron/, rng/, files.json, state.json}, written whole
or not at all, resumed bit for bit.

Called by trainer/loop.py on every rank. `hf/` is a Hugging Face directory with the weights, `megatron/`
Megatron's own format (torch_dist) with the optimizer, readable at other parallel layouts. Each rank syncs and
sums what it has written, and checks its share of the files before a load. Several machines need run_dir on a
common file system. Every wait is bounded.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from torch.distributed.checkpoint.api import CheckpointException

from laminar_hpc.cluster import checkpoints, durable
from laminar_hpc.cluster.checkpoints import Damaged, checkpoint_path, read_state
from laminar_hpc.cluster.durable import FileSum
from laminar_hpc.config.errors import LaminarError, PermanentFailure
from laminar_hpc.messages.membership import Welcome
from laminar_hpc.trainer.agreement import Agreement
from laminar_hpc.trainer.control import all_frames
from laminar_hpc.trainer.megatron.adam import fuse, named_state, restore_step_0, unshare_steps
from laminar_hpc.trainer.megatron.checkpoint_writer import in_process_strategy
from laminar_hpc.trainer.megatron.cpu import cuda_as_cpu
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner

log = logging.getLogger(__name__)
_ELSEWHERE = "a worker has failed"  # rank 0 says why


class Found(NamedTuple):
    """Where a gang starts: the step of the checkpoint that is loaded, None without one; and a line on each
    newer one that is damaged."""

    step: int | None
    passed_over: list[str]


class Checkpointer:
    """Saves and loads the state of one run's trainer. Collective: every rank of the trainer world makes the
    same calls in the same order. `welcome` names store and gang; a checkpoint of another store is refused."""

    def __init__(
        self, run_dir: Path, policy: MegatronPolicy, learner: Learner, welcome: Welcome | None = None
    ) -> None:
        self._run_dir, self._policy, self._learner = Path(run_dir), policy, learner
        self._rank, self._config = dist.get_rank(), policy.config
        self._welcome = welcome or Welcome("")
        self._ranks = Agreement(self._config.cluster.join_timeout_seconds)

    # ---- saving --------------------------------------------------------------------------------------------

    def save(self, step: int) -> tuple[Path, str]:
        """Writes the checkpoint of `step` and deletes those that checkpoint.keep and keep_every do not keep;
        returns its path and state hash.

        It appears under its name only when all that every rank has written is on the disk. Raises
        LaminarError naming the ranks that did not come, or when another gang has taken this one's place.
        """
        target = checkpoint_path(self._run_dir, step)
        partial = target.with_name(f".{target.name}")
        if self._rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            for folder in ("megatron", "rng"):
                (partial / folder).mkdir(parents=True)
        self._ranks.meet(f"the folder of checkpoint {target}")
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
        mine = {str(path.relative_to(partial)): durable.seal(path) for path in self._written(partial)}
        self._ranks.meet(f"checkpoint {target}")
        files = [json.loads(each) for each in self._ranks.gather(json.dumps(mine))]
        if self._rank == 0:
            state = {"step": step, "state_hash": state_hash, **self._layout(), **self._origin()}
            state["skipped_in_a_row"] = self._learner.skipped_in_a_row
            sums = {name: FileSum(*each) for part in files for name, each in part.items()}
            checkpoints.publish(partial, target, state, sums, self._check_fence)
            keep = self._config.checkpoint
            checkpoints.prune(self._run_dir, step, keep.keep, keep.keep_every)
        return target, state_hash

    def _written(self, partial: Path) -> Iterable[Path]:
        """By this rank: its random states and shards, and by rank 0 all else."""
        mine = {partial / "rng" / f"{self._rank:05d}.pt", *partial.glob(f"megatron/__{self._rank}_*")}
        if self._rank != 0:
            return mine
        of_ranks = {*partial.glob("rng/*"), *partial.glob("megatron/__*")}
        return mine | {path for path in partial.rglob("*") if path.is_file()} - (of_ranks - mine)

    def _origin(self) -> dict:
        w = self._welcome
        return {"store_id": w.store_id, "restore_epoch": w.epoch, "gang": w.gang}

    def _check_fence(self, target: Path) -> None:
        """Right before the rename. What is left open is the time between the two, a system call: a gang that
        is stopped there, and wakes up replaced, still gives this checkpoint its name."""
        newest = checkpoints.newest_gang(self._run_dir)
        if self._welcome.gang < newest:
            raise PermanentFailure(
                f"trainer gang {self._welcome.gang} was replaced by gang {newest} while it wrote {target}: "
                "this checkpoint is not kept"
            )

    # ---- loading -------------------------------------------------------------------------------------------

    def restore(self) -> Found:
        """Loads the newest checkpoint of the run that is whole, and puts damaged newer ones aside. The same
        on all ranks.

        Raises PermanentFailure when there are some but none is whole, or when the newest whole one is that of
        another store or cannot be loaded; then all are left as they are.
        """
        if self._rank == 0:
            checkpoints.mend(self._run_dir)
        damaged: list[tuple[Path, str]] = []
        newest_first: list[int] = json.loads(
            self._ranks.gather(json.dumps(checkpoints.present(self._run_dir)[::-1]))[0]
        )
        for step in newest_first:
            path = checkpoint_path(self._run_dir, step)
            if wrong := self._examine(path) or self._try(step):
                damaged.append((path, wrong))
            else:
                return Found(step, [self._set_aside(*each, step) for each in damaged])
        if damaged:
            what = "; ".join(f"{path.name}: {wrong}" for path, wrong in damaged)
            self._refuse(
                f"none of the {len(damaged)} checkpoints in {damaged[0][0].parent} is whole ({what}); "
                "restore one from a copy, or begin anew with resume=never"
            )
        return Found(None, [])

    def _examine(self, path: Path) -> str:
        """Its damage, as all ranks find it together."""
        unseen = [
            rank for rank, seen in enumerate(self._ranks.gather("seen" if path.is_dir() else "")) if not seen
        ]
        if unseen:
            self._refuse(
                f"trainer {unseen[0]} does not see {path}: run_dir must be on a file system that all "
                "trainers share"
            )
        with checkpoints.reading(path):
            mine = checkpoints.damage(path, self._rank, self._ranks.size)
        if wrong := self._ranks.first(mine):
            return wrong
        state, own = read_state(path), self._welcome.store_id
        if own and state.get("store_id", own) != own and not self._config.source.startswith("replay:"):
            self._refuse(
                f"{path} belongs to store {state['store_id']}, the run has store {own}: bring back the "
                "store that the checkpoint was written with, or begin another run with its weights: "
                f"model.path={path / 'hf'} run_dir=ANOTHER"
            )
        if state["distributed_optimizer"] != self._layout()["distributed_optimizer"]:
            # the one keeps its parameters as state, the other does not
            self._refuse(
                f"{path} was saved with "
                f"trainer.distributed_optimizer={str(state['distributed_optimizer']).lower()}; "
                "go on with that, the tensor, pipeline and data parallelism may be others"
            )
        return ""

    def _try(self, step: int) -> str:
        """Loads it; its damage, the same on all ranks, where it has no list that would have told before."""
        try:
            self.load(step)
        except Damaged as error:
            path = checkpoint_path(self._run_dir, step)
            if checkpoints.is_listed(path):
                self._refuse(
                    f"all files of {path} are as they were written, and {error}: is model.path or the "
                    "version of a package another one than then?"
                )
            return str(error)
        return ""

    def _set_aside(self, path: Path, wrong: str, taken: int) -> str:
        kept = checkpoints.set_aside(path) if self._rank == 0 else path
        text = (
            f"checkpoint {path.name} is damaged ({wrong}) and kept as {kept.name}; "
            f"{checkpoint_path(self._run_dir, taken).name} is taken instead"
        )
        if self._rank == 0:
            log.warning(text)
        return text

    def _refuse(self, text: str) -> NoReturn:
        """On all ranks, of which rank 0 says why."""
        if self._rank == 0:
            raise PermanentFailure(text)
        raise LaminarError(_ELSEWHERE)

    def load(self, step: int) -> None:
        """Restores weights, optimizer, schedule and random states. At the layout that it was saved with, the
        result is bit-exact: its hash is compared. Raises Damaged, on all ranks."""
        path = checkpoint_path(self._run_dir, step)
        state, mine = read_state(path), self._layout()
        same_layout = {key: state.get(key) for key in mine} == mine
        try:
            with checkpoints.reading(path), cuda_as_cpu():
                self._load_parts(path, same_layout)
            wrong = ""
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            words = str(error).strip().splitlines()
            wrong = f"it cannot be read: {type(error).__name__}: {words[-1] if words else ''}"
        if wrong := self._ranks.first(wrong):
            raise Damaged(wrong)
        self._learner.skipped_in_a_row = state["skipped_in_a_row"]
        if not same_layout:
            return  # other random streams, other shards to hash
        state_hash = self.state_hash()
        if state_hash != state["state_hash"]:
            raise Damaged(f"its state hash is {state_hash[:12]}, not {state['state_hash'][:12]}")

    def _load_parts(self, path: Path, with_random_states: bool) -> None:
        loaded = dist_checkpointing.load(self._sharded_state(loading=True), str(path / "megatron"))
        self._policy.gpt.load_state_dict(loaded["model"])
        if not self._config.trainer.distributed_optimizer:
            restore_step_0(loaded["optimizer"])
        self._policy.optimizer.load_state_dict(loaded["optimizer"])
        self._policy.scheduler.num_steps = 0  # loading counts on from here
        self._policy.scheduler.load_state_dict(loaded["scheduler"])
        unshare_steps(self._policy.optimizer)
        fuse(self._policy.optimizer)  # a load brings the settings of what was saved, too
        if with_random_states:
            set_rng_state(torch.load(path / "rng" / f"{self._rank:05d}.pt", weights_only=True))

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
        parts = all_frames(mine.digest(), self._ranks.seconds, "the state hash")
        return hashlib.sha256(b"".join(parts)).hexdigest()

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
