"""What a controller that starts over the store of a run under way takes up from the one before, beside the
trajectories: how far trainers and evaluations are, whether the run ends, and the batch that a trainer may ask
for again. One row of the table `meta`, written in the turn that changes it.

Trainers that outlived their controller go on from there; trainers that start say Restored, and with it
controller/training.py goes back. Only with a torchrun per role: else everything starts anew.
"""

import msgspec

from laminar_hpc.controller.shared import RunState
from laminar_hpc.controller.trajectories.evaluations import Evaluations
from laminar_hpc.store.store import Store

_KEY = "under_way"


class _Batch(msgspec.Struct):
    """What was sent for a TakeBatch."""

    step: int
    part: int
    groups: list[int]


class _UnderWay(msgspec.Struct, omit_defaults=True):
    trainer_generation: str
    trainer_step: int
    steps_done: int = 0
    trainer_done: bool = False
    stopping: str = ""
    failure: str = ""
    evaluations: list[tuple[str, str, int]] = []
    batch: _Batch | None = None
    begun: list[tuple[str, int, int, float]] = []  # of the evaluations: key, weight id, step, since when


class Continuation:
    """`recall` once at the start, then `note` in each turn before its commit, `over` when all have left."""

    def __init__(self, store: Store, state: RunState, evaluations: Evaluations | None) -> None:
        self._store = store
        self._state = state
        self._evaluations = evaluations
        self._batch: _Batch | None = None
        self._ends = False  # the trainers were done, or told to stop, when this controller started
        self._written = store.get_text(_KEY)
        self._noted: _UnderWay | None = None  # what was written last, here

    def recall(self, shares: int) -> None:
        """Sets `state` and `evaluations` to what the store knows, if trainers had said where they start.
        `shares`: into how many an evaluation is split."""
        if not self._written:
            return
        known, state = msgspec.json.decode(self._written, type=_UnderWay), self._state
        state.trainer_generation = known.trainer_generation
        state.trainer_step = known.trainer_step
        state.steps_done = known.steps_done
        state.groups_taken = len(self._store.rows.consumed_groups(known.trainer_step))
        state.trainer_done = known.trainer_done
        state.stopping = known.stopping
        state.failure = known.failure
        self._batch = known.batch
        self._ends = known.trainer_done or bool(known.stopping)
        if self._evaluations is not None:
            self._evaluations.first_id = max((i for i, _ in self._store.starts_of_trainers()), default=0)
            for name, label, min_step in known.evaluations:
                self._evaluations.add(label, min_step, shares if label != "step" else 1, name)
            for begun in known.begun:
                self._evaluations.go_on(*begun)

    def finish(self) -> None:
        """The workers that outlived the last controller are here: the run ends if nothing was left to do."""
        state = self._state
        if self._ends and state.trainer_done:
            due = bool(self._evaluations and self._evaluations.queue)
            state.finished = state.finished or bool(state.stopping) or not due

    def note(self) -> None:
        """What has changed goes into the open transaction; also while other trainers are awaited, under the
        name of those that have gone."""
        state, due = self._state, self._evaluations.queue if self._evaluations else []
        trainer_generation = state.trainer_generation or (
            self._noted.trainer_generation if self._noted else ""
        )
        if not trainer_generation:
            return
        now = _UnderWay(
            trainer_generation,
            state.trainer_step,
            state.steps_done,
            state.trainer_done,
            state.stopping,
            state.failure,
            [(e.name, e.label, e.min_step) for e in due],
            self._batch,
            [
                (e.key, e.weight_id, e.weight_step, e.started)
                for e in due
                if e.weight_id is not None and e.weight_step is not None
            ],
        )
        if now == self._noted:
            return
        self._noted = now
        text = msgspec.json.encode(now).decode()
        if text != self._written:
            self._store.put_text(_KEY, text)
            self._written = text

    def other_trainers(self) -> None:
        """Those that the store knows are gone, and with them what the user had asked of them."""
        if self._ends:
            self._ends = False
            self._state.trainer_done = False
            self._state.stopping = ""
            self._state.failure = ""

    def over(self) -> None:
        """The run has ended in order: nothing is under way."""
        self._noted = None
        self._store.put_text(_KEY, "")

    # ---- the newest batch ----------------------------------------------------------------------------------

    def sent(self, step: int, part: int, groups: list[int]) -> None:
        self._batch = _Batch(step, part, groups)

    def sent_before(self, step: int, part: int) -> list[int] | None:
        """The groups that went out for this very request, if it was answered before."""
        batch = self._batch
        if batch is None or (batch.step, batch.part) != (step, part):
            return None
        return batch.groups

    def taken_back(self) -> None:
        """What was sent cannot be trained as it is."""
        self._batch = None

    def trainers_start(self) -> None:
        """What was sent is back in the buffer."""
        self._batch = None
