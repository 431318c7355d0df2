"""Evaluations: local batches on one weight id, outside admission and buffer. Which are due, who does them, and what came out."""

import math
from dataclasses import dataclass, field

from laminar_hpc.controller.prompts import Prompt
from laminar_hpc.messages import Generated, Grant, Lost, PromptGroup, Sample, Scored


@dataclass
class Piece:
    """A part of an evaluation that one replica does at a time."""

    first: int
    last: int
    replica: int = -1
    attempt: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return len(self.scores) == self.last - self.first


@dataclass
class Evaluation:
    """One pass over the held-out problems. `min_step`: weights of at least this step; the first replica that starts fixes the id."""

    name: str  # greedy | sampled
    label: str  # before | step | after
    min_step: int
    temperature: float
    pieces: list[Piece]
    weight_id: int | None = None
    weight_step: int = -1
    started: float = 0.0

    @property
    def problems(self) -> int:
        return self.pieces[-1].last

    @property
    def scored(self) -> int:
        return sum(len(p.scores) for p in self.pieces)

    @property
    def key(self) -> str:
        return f"{self.label}-{self.name}-{self.min_step}"


class Evaluations:
    """The queue of evaluations; the oldest goes first, its pieces to whichever idle replica is on its weights."""

    def __init__(self, prompts: list[Prompt], max_response_tokens: int) -> None:
        self._prompts, self._max_tokens = prompts, max_response_tokens
        self.queue: list[Evaluation] = []
        self.finished: list[Evaluation] = []

    def add(self, name: str, label: str, min_step: int, temperature: float, pieces: int) -> None:
        size = math.ceil(len(self._prompts) / max(1, pieces))
        parts = [Piece(i, min(i + size, len(self._prompts))) for i in range(0, len(self._prompts), size)]
        self.queue.append(Evaluation(name, label, min_step, temperature, parts))

    def grant(self, replica: int, weight_id: int, weight_step: int, batch_id: int, now: float) -> Grant | None:
        """A piece for an idle replica with these weights, or None when there is nothing for it."""
        for evaluation in self.queue:
            fits = weight_step >= evaluation.min_step if evaluation.weight_id is None else weight_id == evaluation.weight_id
            piece = next((p for p in evaluation.pieces if p.replica < 0 and not p.done), None)
            if not fits or piece is None:
                continue
            if evaluation.weight_id is None:
                evaluation.weight_id, evaluation.weight_step, evaluation.started = weight_id, weight_step, now
            piece.replica = replica
            piece.attempt += 1
            open_ids = [i for i in range(piece.first, piece.last) if i not in piece.scores]
            groups = [PromptGroup(-1, p.tokens, p.text, p.row, [Sample(i, piece.attempt)]) for i in open_ids for p in [self._prompts[i]]]
            return Grant(batch_id, weight_id, weight_step, groups, evaluation.temperature, self._max_tokens, evaluation.key)
        return None

    def _piece(self, key: str, index: int, attempt: int) -> tuple[Evaluation, Piece] | None:
        for evaluation in self.queue:
            for piece in evaluation.pieces:
                if evaluation.key == key and piece.first <= index < piece.last and piece.attempt == attempt:
                    return evaluation, piece
        return None

    def generated(self, message: Generated) -> None:
        found = self._piece(message.evaluation, message.trajectory.trajectory_id, message.trajectory.attempt)
        if found:
            found[1].lengths[message.trajectory.trajectory_id] = len(message.trajectory.response_tokens)

    def scored(self, message: Scored) -> Evaluation | None:
        """Returns the evaluation when this was its last score."""
        found = self._piece(message.evaluation, message.trajectory_id, message.attempt)
        if not found:
            return None
        evaluation, piece = found
        piece.scores[message.trajectory_id] = message.parts.get("accuracy", float(message.reward > 0))
        if evaluation.scored < evaluation.problems:
            return None
        self.queue.remove(evaluation)
        self.finished.append(evaluation)
        return evaluation

    def lost(self, message: Lost) -> None:
        found = self._piece(message.evaluation, message.trajectory_id, message.attempt)
        if found:
            found[1].replica = -1

    def replica_gone(self, replica: int) -> None:
        """Its pieces go to another replica on the same id; one that nobody serves any more starts again on a newer id."""
        for evaluation in self.queue:
            for piece in evaluation.pieces:
                if piece.replica == replica and not piece.done:
                    piece.replica = -1

    def reset_stranded(self, served: set[int]) -> None:
        """An evaluation whose id no replica serves any more starts again on the newest."""
        for evaluation in self.queue:
            idle = all(p.replica < 0 or p.done for p in evaluation.pieces)
            if evaluation.weight_id is not None and evaluation.weight_id not in served and idle:
                evaluation.weight_id = None
                for piece in evaluation.pieces:
                    piece.scores.clear()
                    piece.lengths.clear()
                    piece.replica = -1

    @staticmethod
    def result(evaluation: Evaluation, now: float) -> dict:
        scores = [s for p in evaluation.pieces for s in p.scores.values()]
        lengths = [n for p in evaluation.pieces for n in p.lengths.values()]
        return {
            "name": evaluation.name, "label": evaluation.label, "step": evaluation.weight_step, "weight_id": evaluation.weight_id,
            "accuracy": sum(scores) / len(scores), "problems": len(scores), "seconds": now - evaluation.started,
            "response_length_mean": sum(lengths) / max(1, len(lengths)),
        }  # fmt: skip
