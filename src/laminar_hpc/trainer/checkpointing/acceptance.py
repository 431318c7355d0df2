"""Whether a checkpoint may be loaded: it is signed with the run's key, whole, and belongs to this run. Used
by trainer/checkpoint.py. Nothing of it is unpickled before.
"""

from pathlib import Path
from typing import NoReturn

from laminar_hpc.config.errors import LaminarError, PermanentFailure
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.membership import Welcome
from laminar_hpc.store import checkpoints, signatures
from laminar_hpc.store.checkpoints import DamagedCheckpoint, read_state
from laminar_hpc.trainer.agreement import Agreement

_ELSEWHERE = "a worker has failed"  # rank 0 says why


class Acceptance:
    """Of checkpoints in `run_dir`. Collective: all ranks make the same calls and come to the same result."""

    def __init__(self, run_dir: Path, config: RunConfig, welcome: Welcome, ranks: Agreement) -> None:
        self._run_dir = run_dir
        self._config = config
        self._welcome = welcome
        self._ranks = ranks

    def examine(self, path: Path) -> str:
        """Its damage. Raises PermanentFailure on rank 0, LaminarError on others, where it is whole and not to
        be loaded."""
        unseen = [
            rank for rank, seen in enumerate(self._ranks.gather("seen" if path.is_dir() else "")) if not seen
        ]
        if unseen:
            self.refuse(
                f"trainer {unseen[0]} does not see {path}: run_dir must be on a file system that all "
                "trainers share"
            )
        with checkpoints.reading(path):
            if wrong := self._check_signature(path):
                return wrong
            mine = checkpoints.damage(path, self._ranks.rank, self._ranks.size)
        if wrong := self._ranks.first(mine):
            return wrong
        self._check_origin(path)
        return ""

    def _check_signature(self, path: Path) -> str:
        foreign = wrong = ""
        try:
            foreign = signatures.objection(self._config, self._run_dir, path)
        except DamagedCheckpoint as error:
            wrong = str(error)
        except LaminarError as error:
            foreign = str(error)
        if foreign := self._ranks.first(foreign):
            self.refuse(foreign)
        return self._ranks.first(wrong)

    def _check_origin(self, path: Path) -> None:
        state, own = read_state(path), self._welcome.store_id
        if own and state.get("store_id", own) != own and not self._config.source.startswith("replay:"):
            self.refuse(
                f"{path} belongs to store {state['store_id']}, the run has store {own}: bring back the "
                "store that the checkpoint was written with, or begin another run with its weights: "
                f"{checkpoints.going_on_from(path)} run_dir=ANOTHER"
            )
        if state["distributed_optimizer"] != layout_of(self._config)["distributed_optimizer"]:
            # the one keeps its parameters as state, the other does not
            self.refuse(
                f"{path} was saved with "
                f"trainer.distributed_optimizer={str(state['distributed_optimizer']).lower()}; "
                "go on with that, the other parallelism may change"
            )

    def refuse(self, text: str) -> NoReturn:
        """Ends all ranks; rank 0 says why."""
        if self._ranks.rank == 0:
            raise PermanentFailure(text)
        raise LaminarError(_ELSEWHERE)


def layout_of(config: RunConfig) -> dict[str, int | bool]:
    """What a checkpoint keeps of the trainer's layout."""
    t = config.trainer
    return {
        "tensor_parallel": t.tensor_parallel,
        "context_parallel": t.context_parallel,
        "pipeline_parallel": t.pipeline_parallel,
        "virtual_stages": t.virtual_stages,
        "data_parallel": t.data_parallel,
        "expert_parallel": t.expert_parallel,
        "distributed_optimizer": t.distributed_optimizer,
    }
