"""Checkpoints: run_dir/checkpoints/step_000020/{hf/, megatron/, rng/, files.json, signature.json,
state.json}, written whole or not at all while training goes on, resumed bit for bit.

Called by trainer/loop.py on every rank. `hf/` is a Hugging Face directory with the weights, or one of PEFT's
with the adapter that is trained in their place, `megatron/` Megatron's own format (torch_dist) with the
optimizer; both can be read at other parallel layouts. Training stands still while each rank copies what it
will write to host memory; a thread writes, syncs and sums it (checkpointing/in_flight.py), and rank 0 gives
the checkpoint its name. Each rank checks its share of the files before a load, and reads what it needs.
Several machines need run_dir on a common file system. Every wait is bounded.
"""

import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Set
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from laminar_hpc.config.errors import LaminarError, PermanentFailure
from laminar_hpc.line.messages.membership import Welcome
from laminar_hpc.machine.files import durable
from laminar_hpc.store import checkpoints
from laminar_hpc.store.checkpoints import DamagedCheckpoint, checkpoint_path, read_state
from laminar_hpc.store.signatures import own_key
from laminar_hpc.trainer.agreement import Agreement
from laminar_hpc.trainer.checkpointing.acceptance import Acceptance, layout_of
from laminar_hpc.trainer.checkpointing.adapter_files import AdapterFiles
from laminar_hpc.trainer.checkpointing.copies import HostCopies
from laminar_hpc.trainer.checkpointing.hf_files import Collected, HfFiles
from laminar_hpc.trainer.checkpointing.in_flight import InFlight
from laminar_hpc.trainer.checkpointing.live_state import BESIDE, LiveState, rng_state
from laminar_hpc.trainer.checkpointing.reports import CheckpointPart, Reports, Saved
from laminar_hpc.trainer.control import all_frames, from_first
from laminar_hpc.trainer.megatron.building import apply_settings
from laminar_hpc.trainer.megatron.checkpoint_writer import Shards, ShardWriter
from laminar_hpc.trainer.megatron.cpu import cuda_as_cpu
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner

log = logging.getLogger(__name__)
_LAST_SECONDS = 5.0  # for a checkpoint on its way to the disk when this process ends with an error


class _Content(NamedTuple):
    """What this rank writes of a checkpoint: copies, or without room for them the live tensors."""

    shards: Shards
    hf: Collected
    random: bytes
    copied: bool


class RestorePoint(NamedTuple):
    """Where a trainer generation starts: the step of the checkpoint that is loaded, None without one; and a
    line on each newer one that is damaged."""

    step: int | None
    passed_over: list[str]


class Checkpointer:
    """Saves and loads the state of one run's trainer. Collective: every rank of the trainer world makes the
    same calls in the same order. `welcome` names store and trainer generation; a checkpoint of another store
    is refused."""

    def __init__(
        self,
        run_dir: Path,
        policy: MegatronPolicy,
        learner: Learner,
        welcome: Welcome | None = None,
        saved: Callable[[Saved], None] = lambda _: None,
        failed: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        """On rank 0 another thread calls `saved` for each checkpoint that has its name, and `failed` for one
        that could not be written."""
        self._failed = failed
        self._run_dir = Path(run_dir)
        self._policy = policy
        self._learner = learner
        self._rank = dist.get_rank()
        self._config = policy.config
        self._welcome = welcome or Welcome("")
        self._saved = saved
        self._ranks = Agreement(self._config.cluster.join_timeout_seconds)
        self._acceptance = Acceptance(self._run_dir, self._config, self._welcome, self._ranks)
        self._live = LiveState(policy, learner.beside)
        adapter = self._config.model.lora.rank > 0
        self._hf = AdapterFiles(policy) if adapter else HfFiles(policy, self._ranks.seconds)
        self._shards = ShardWriter(lambda mine: bool(self._ranks.first("changed" if mine else "")))
        self._copies = HostCopies(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._flight: InFlight | None = None

    # ---- saving --------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Plans what each rank writes, and lets a thread make the buffers of the copies, which the first
        checkpoint would else wait for; all others have them anyway."""
        with tempfile.TemporaryDirectory() as folder:
            shards = self._plan(Path(folder))
        wanted = [*shards.wanted, *self._hf.wanted]
        if self._copies.have_room(wanted):
            self._copies.make(wanted)

    def _plan(self, folder: Path) -> Shards:
        with cuda_as_cpu():
            return self._shards.plan(self._live.sharded(loading=False), folder)

    def begin(self, step: int) -> str:
        """Copies what this rank writes of the checkpoint of `step`, and returns its state hash: the rest
        happens beside the training. Where the machine has no room for the copies it returns when the
        files are written.

        The checkpoint appears under its name only when all that every rank has written is on the disk; then
        those that checkpoint.keep and keep_every do not keep are deleted. One that is still on its way is
        waited for. Raises LaminarError naming the ranks that did not come, and what `finish` raises.
        """
        self._land()
        started, target = time.monotonic(), checkpoint_path(self._run_dir, step)
        partial = self._open_folder(target)
        content = self._take(partial)
        state_hash = self.state_hash() if self._config.checkpoint.state_hash else ""
        w = self._welcome
        origin = {"store_id": w.store_id, "restore_epoch": w.epoch, "gang": w.trainer_generation}
        state = {"step": step, "state_hash": state_hash, **layout_of(self._config), **origin}
        state |= {**{name: name in self._live.beside for name in BESIDE}, **self._learner.state}
        name = from_first(uuid.uuid4().hex.encode(), self._ranks.seconds, f"checkpoint {target}").decode()
        stalled = time.monotonic() - started

        def complete(parts: list[CheckpointPart]) -> None:
            self._complete(partial, target, content.shards, state, parts)
            seconds = time.monotonic() - started
            self._saved(Saved(step, target, seconds, stalled if content.copied else seconds, state_hash))

        self._flight = InFlight(
            f"checkpoint {target}",
            Reports(dist.distributed_c10d._get_default_store(), name, self._ranks.size),
            self._rank,
            lambda check: self._write(partial, content, check),
            complete if self._rank == 0 else None,
            self._ranks.seconds,
            self._failed,
        )
        self._flight.start(in_foreground=not content.copied)
        return state_hash

    def _take(self, partial: Path) -> _Content:
        shards = self._plan(partial / "megatron")
        wanted = [*shards.wanted, *self._hf.wanted]
        copies = self._copies if self._copies.have_room(wanted) else None
        if copies is None:
            text = "no room for a copy of %.1f GB beside the training, which waits until %s is written"
            nbytes = sum(each.nbytes for each in wanted)
            log.warning(text, nbytes / 1e9, partial.stem.removeprefix("."))
        else:
            shards.copy_to(copies)
        hf, random = self._hf.collect(copies), io.BytesIO()
        torch.save(rng_state(), random)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return _Content(shards, hf, random.getvalue(), copies is not None)

    def poll(self) -> None:
        """Raises what has gone wrong with the checkpoint on its way, if anything has."""
        if self._flight is not None:
            self._flight.poll()

    def finish(self) -> None:
        """Returns on all ranks when the checkpoint on its way has its name. Raises OSError, and LaminarError
        when it took too long, when another rank failed, or when another trainer generation has taken this
        one's place."""
        self._land()
        self._ranks.meet(f"the end of a checkpoint in {self._run_dir}")

    def _land(self) -> None:
        """Returns when this rank's part is on the disk, and on rank 0 when the checkpoint has its name."""
        flight = self._flight
        self._flight = None
        if flight is not None:
            flight.wait()

    def close(self) -> None:
        """At the end of this process, whatever it ends with: a checkpoint on its way has some seconds, then
        it gets no name."""
        self._copies.close()
        flight = self._flight
        self._flight = None
        if flight is not None:
            flight.give_up(_LAST_SECONDS)

    def save(self, step: int) -> tuple[Path, str]:
        """Begins and finishes the checkpoint of `step` on all ranks; its path and state hash."""
        target, state_hash = checkpoint_path(self._run_dir, step), self.begin(step)
        self.finish()
        return target, state_hash

    def _open_folder(self, target: Path) -> Path:
        """Where it is written; empty, and there for all ranks. A trainer generation's own: one before may
        still write."""
        partial = target.with_name(f".{target.name}.{self._welcome.trainer_generation}")
        if self._rank == 0:
            self._check_fence(target)
            for left in target.parent.glob(f".{target.name}.*"):
                shutil.rmtree(left, ignore_errors=True)
            for folder in ("hf", "megatron", "rng"):
                (partial / folder).mkdir(parents=True)
        self._ranks.meet(f"the folder of checkpoint {target}")
        if not (partial / "rng").is_dir():
            raise LaminarError(
                f"trainer {self._rank} does not see {partial}: "
                "run_dir must be on a file system that all trainers share"
            )
        return partial

    def _write(self, partial: Path, content: _Content, check: Callable[[], None]) -> CheckpointPart:
        """This rank's part, by its thread."""
        own, folder = f"rng/{self._rank:05d}.pt", partial / "hf"
        durable.write(partial / own, content.random)
        sums, written = content.shards.write(check)
        files = {own: durable.sum_of(content.random)}
        files |= {f"megatron/{name}": each for name, each in sums.items()}
        files |= {f"hf/{name}": each for name, each in self._hf.write(folder, content.hf, check).items()}
        return CheckpointPart(files, written)

    def _complete(
        self, partial: Path, target: Path, shards: Shards, state: dict, parts: list[CheckpointPart]
    ) -> None:
        """Rank 0 gives the checkpoint its name, when all parts are on the disk."""
        shards.complete([part.written for part in parts])
        sums = {name: each for part in parts for name, each in part.files.items()}
        for path in (partial / "megatron").iterdir():
            if f"megatron/{path.name}" not in sums:  # of Megatron's, beside the shards
                sums[f"megatron/{path.name}"] = durable.seal(path)
        key = own_key(self._config, self._run_dir)
        checkpoints.publish(partial, target, state, sums, key.sign, self._check_fence)
        keep = self._config.checkpoint
        checkpoints.prune(self._run_dir, state["step"], keep.keep, keep.keep_every)

    def _check_fence(self, target: Path) -> None:
        """Right before the rename. What is left open is the time between the two, a system call: a trainer
        generation that is stopped there, and wakes up replaced, still gives this checkpoint its name."""
        newest = checkpoints.newest_trainer_generation(self._run_dir)
        if self._welcome.trainer_generation < newest:
            raise PermanentFailure(
                f"trainer generation {self._welcome.trainer_generation} was replaced by {newest} while it "
                f"wrote {target}: "
                "this checkpoint is not kept"
            )

    # ---- loading -------------------------------------------------------------------------------------------

    def restore(self) -> RestorePoint:
        """Loads the newest checkpoint of the run that is whole, and puts damaged newer ones aside. The same
        on all ranks.

        Raises PermanentFailure when there are some but none is whole, or when the newest whole one is not
        signed with the run's key, is that of another store or cannot be loaded; then all are left as they
        are.
        """
        if self._rank == 0:
            checkpoints.mend(self._run_dir)
            if self._config.checkpoint.key:
                own_key(self._config, self._run_dir)  # rather now than with the first checkpoint
        damaged: list[tuple[Path, str]] = []
        newest_first: list[int] = json.loads(
            self._ranks.gather(json.dumps(checkpoints.present(self._run_dir)[::-1]))[0]
        )
        for step in newest_first:
            path = checkpoint_path(self._run_dir, step)
            if wrong := self._acceptance.examine(path) or self._try(step):
                damaged.append((path, wrong))
            else:
                return RestorePoint(step, [self._set_aside(*each, step) for each in damaged])
        if damaged:
            what = "; ".join(f"{path.name}: {wrong}" for path, wrong in damaged)
            self._acceptance.refuse(
                f"none of the {len(damaged)} checkpoints in {damaged[0][0].parent} is whole ({what}); "
                "restore one from a copy, or begin anew with resume=never"
            )
        return RestorePoint(None, [])

    def _try(self, step: int) -> str:
        """Loads it; its damage, the same on all ranks, where it has no list that would have told before."""
        try:
            self.load(step)
        except DamagedCheckpoint as error:
            path = checkpoint_path(self._run_dir, step)
            if checkpoints.is_listed(path):
                self._acceptance.refuse(
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

    def load(self, step: int) -> None:
        """Restores weights, optimizer, schedule and random states. At the layout that it was saved with, the
        result is bit-exact: its hash, if it has one, is compared. The optimizer's settings are those of this
        launch's configuration. Raises Damaged, on all ranks."""
        path = checkpoint_path(self._run_dir, step)
        state, mine = read_state(path), layout_of(self._config)
        same_layout = {key: state.get(key, 1) for key in mine} == mine  # older ones name no virtual stages
        there = {name for name in BESIDE if state.get(name)}
        try:
            with checkpoints.reading(path), cuda_as_cpu():
                self._live.load(path, same_layout, f"{self._rank:05d}.pt", there)
            wrong = ""
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            words = str(error).strip().splitlines()
            wrong = f"it cannot be read: {type(error).__name__}: {words[-1] if words else ''}"
        if wrong := self._ranks.first(wrong):
            raise DamagedCheckpoint(wrong)
        self._learner.take_state(state)
        # else other random streams, other shards, or a reference that is not taken
        hashed = state["state_hash"] if same_layout and there <= self._live.beside else ""
        if hashed and (state_hash := self.state_hash(there)) != hashed:
            raise DamagedCheckpoint(f"its state hash is {state_hash[:12]}, not {hashed[:12]}")
        # not those of the launch that saved
        apply_settings(self._config, self._policy.optimizer, self._policy.scheduler)

    def state_hash(self, those: Set[str] | None = None) -> str:
        """SHA-256 over every rank's weights, optimizer tensors, schedule, random states and what is beside,
        in the order of the ranks. Equal on all ranks."""
        parts = all_frames(self._live.digest(those), self._ranks.seconds, "the state hash")
        return hashlib.sha256(b"".join(parts)).hexdigest()
