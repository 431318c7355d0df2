"""Evaluations: local batches on one weight id, outside admission and buffer. Which are due, who does them,
and what came out.

One evaluation asks every problem of every file, greedily once or sampled `samples` times, so that all files
are judged on the same weights.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush

from laminar_hpc.data.prompts import Prompt
from laminar_hpc.line.messages.data import PromptGroup, Sample
from laminar_hpc.line.messages.rollouts import Generated, Grant, Lost, Scored
from laminar_hpc.policies.metrics import accuracy
from laminar_hpc.store.store import Store

_NO_GROUP = -1  # on the wire: the groups of an evaluation have no ids


@dataclass
class EvaluationShare:
    """The part of an evaluation that one replica does at a time: the responses to problems `first` up to
    `last`, `samples` to each.

    A response is known by its number: problem * samples + sample.
    """

    first: int
    last: int
    samples: int
    replica: int | None = None
    attempt: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    @property
    def free(self) -> bool:
        """It is to be done, and by nobody so far."""
        return self.replica is None and not self.done

    @property
    def done(self) -> bool:
        return len(self.scores) == (self.last - self.first) * self.samples


@dataclass
class Evaluation:
    """One pass over all held-out problems. `min_step`: weights of at least this step; the first replica that
    starts fixes the id."""

    name: str  # greedy | sampled
    label: str  # before | step | after
    min_step: int
    temperature: float
    samples: int
    shares: list[EvaluationShare]
    weight_id: int | None = None
    weight_step: int | None = None
    started: float = 0.0
    scored: int = 0
    _busy: set[int] = field(default_factory=set)  # shares that a replica has and that are not done
    _free: list[int] = field(default_factory=list)  # a heap with all shares that are free, and some that were

    def __post_init__(self) -> None:
        self._free = list(range(len(self.shares)))

    @property
    def responses(self) -> int:
        return self.shares[-1].last * self.samples

    @property
    def idle(self) -> bool:
        """Nobody is at work on it."""
        return not self._busy

    def first_free(self) -> EvaluationShare | None:
        while self._free and not self.shares[self._free[0]].free:
            heappop(self._free)
        return self.shares[self._free[0]] if self._free else None

    def _place(self, share: EvaluationShare) -> int:
        """All shares but the last are of one size."""
        return share.first // self.shares[0].last

    def share_of(self, number: int) -> EvaluationShare | None:
        """That holds the response of this number."""
        if not 0 <= number < self.responses:
            return None
        return self.shares[number // self.samples // self.shares[0].last]

    def takes(self, share: EvaluationShare, replica: int | None) -> None:
        """`replica` does this share from here on; None: nobody."""
        share.replica = replica
        place = self._place(share)
        if replica is None or share.done:
            self._busy.discard(place)
        else:
            self._busy.add(place)
        if share.free:
            heappush(self._free, place)

    def score(self, share: EvaluationShare, number: int, score: float) -> None:
        self.scored += number not in share.scores
        share.scores[number] = score
        if share.done:
            self._busy.discard(self._place(share))

    @property
    def key(self) -> str:
        return f"{self.label}-{self.name}-{self.min_step}"

    def start_again(self) -> None:
        """Starts anew on other weights; reports on the old ones no longer count."""
        self.weight_id = self.weight_step = None
        for share in self.shares:
            share.scores.clear()
            share.lengths.clear()
            share.replica = None
            share.attempt = 0
        self.scored = 0
        self._free = list(range(len(self.shares)))
        self._busy.clear()


class Evaluations:
    """The queue of evaluations; the oldest goes first, its shares to whichever idle replica is on its
    weights.

    `files`: name -> problems, in order. `samples`: responses per problem of a sampled evaluation, at
    `temperature`; 0 = greedy only.
    """

    def __init__(
        self,
        files: dict[str, list[Prompt]],
        samples: int,
        temperature: float,
        max_response_tokens: int,
        first_attempt: int = 0,
        store: Store | None = None,
    ) -> None:
        """`first_attempt`: above those of earlier controllers, whose shares nobody knows. `store` keeps the
        scores of an evaluation until it is complete."""
        self._store = store
        self._files = files
        self._samples = samples
        self._temperature = temperature
        self._max_tokens = max_response_tokens
        self._prompts = [prompt for prompts in files.values() for prompt in prompts]
        self.queue: list[Evaluation] = []
        self.first_id = 0  # of the weights that the present trainers publish
        self._attempts = first_attempt

    def add(self, label: str, min_step: int, shares: int, only: str = "") -> None:
        """A greedy evaluation and, if samples are configured, a sampled one, each in so many shares; or the
        one of the name `only`."""
        size = math.ceil(len(self._prompts) / max(1, shares))
        for name, temperature, samples in (("greedy", 0.0, 1), ("sampled", self._temperature, self._samples)):
            if samples and only in ("", name):
                starts = range(0, len(self._prompts), size)
                parts = [EvaluationShare(i, min(i + size, len(self._prompts)), samples) for i in starts]
                self.queue.append(Evaluation(name, label, min_step, temperature, samples, parts))

    def go_on(self, key: str, weight_id: int, weight_step: int, started: float) -> None:
        """An evaluation that an earlier controller had begun, on these weights: what was scored counts."""
        evaluation = next((each for each in self.queue if each.key == key), None)
        if evaluation is None or self._store is None:
            return
        evaluation.weight_id = weight_id
        evaluation.weight_step = weight_step
        evaluation.started = started
        for number, score, length in self._store.evaluated(key, weight_id):
            if share := evaluation.share_of(number):
                evaluation.score(share, number, score)
                share.lengths[number] = length

    def grant(
        self, replica: int, weight_id: int, weight_step: int, batch_id: int, now: float
    ) -> Grant | None:
        """A share for an idle replica with these weights, or None when there is nothing for it."""
        evaluation, share = self._next_share(weight_id, weight_step)
        if evaluation is None or share is None:
            return None
        if evaluation.weight_id is None:
            evaluation.weight_id = weight_id
            evaluation.weight_step = weight_step
            evaluation.started = now
        evaluation.takes(share, replica)
        self._attempts += 1
        share.attempt = self._attempts
        sampling = (evaluation.temperature, self._max_tokens)
        return Grant(batch_id, weight_id, weight_step, self._groups(share), *sampling, evaluation.key)

    def has_work(self, weight_id: int, weight_step: int) -> bool:
        """Whether `grant` would give a share to a replica with these weights."""
        return self._next_share(weight_id, weight_step) != (None, None)

    def goes_on_with(self, weight_id: int) -> bool:
        """Whether `grant` would give a share of an evaluation that has begun on these weights."""
        return any(e.weight_id == weight_id and e.first_free() is not None for e in self.queue)

    def _next_share(
        self, weight_id: int, weight_step: int
    ) -> tuple[Evaluation, EvaluationShare] | tuple[None, None]:
        for evaluation in self.queue:
            fits = (
                weight_step >= evaluation.min_step and weight_id >= self.first_id
                if evaluation.weight_id is None
                else weight_id == evaluation.weight_id
            )
            if fits and (share := evaluation.first_free()):
                return evaluation, share
        return None, None

    def _groups(self, share: EvaluationShare) -> list[PromptGroup]:
        """Returns the share's problems with the samples that have no score yet."""
        groups = []
        for problem in range(share.first, share.last):
            prompt = self._prompts[problem]
            numbers = range(problem * share.samples, (problem + 1) * share.samples)
            samples = [Sample(i, share.attempt) for i in numbers if i not in share.scores]
            if samples:
                groups.append(PromptGroup(_NO_GROUP, prompt.tokens, prompt.text, prompt.row, samples))
        return groups

    def _share(
        self, key: str, number: int, attempt: int
    ) -> tuple[Evaluation, EvaluationShare] | tuple[None, None]:
        for evaluation in self.queue:
            share = evaluation.share_of(number) if evaluation.key == key else None
            if share is not None and share.attempt == attempt:
                return evaluation, share
        return None, None

    def generated(self, message: Generated) -> None:
        trajectory = message.trajectory
        _, share = self._share(message.evaluation, trajectory.trajectory_id, trajectory.attempt)
        if share is not None:
            share.lengths[trajectory.trajectory_id] = trajectory.length

    def scored(self, message: Scored) -> Evaluation | None:
        """Returns the evaluation when this was its last score."""
        evaluation, share = self._share(message.evaluation, message.trajectory_id, message.attempt)
        if evaluation is None or share is None:
            return None
        number, score = message.trajectory_id, accuracy(message.reward, message.parts)
        evaluation.score(share, number, score)
        if evaluation.scored < evaluation.responses:
            if self._store is not None and evaluation.weight_id is not None:
                length = share.lengths.get(number, 0)
                self._store.note_evaluated(evaluation.key, number, evaluation.weight_id, score, length)
            return None
        if self._store is not None:
            self._store.forget_evaluated(evaluation.key)
        self.queue.remove(evaluation)
        return evaluation

    def lost(self, message: Lost) -> None:
        evaluation, share = self._share(message.evaluation, message.trajectory_id, message.attempt)
        if evaluation is not None and share is not None:
            evaluation.takes(share, None)

    def replica_lost(self, replica: int) -> None:
        """Its shares go to another replica on the same id; one that nobody serves begins again on a newer."""
        for evaluation in self.queue:
            for share in evaluation.shares:
                if share.replica == replica and not share.done:
                    evaluation.takes(share, None)

    def reset_stranded(self, served: Collection[int]) -> None:
        """An evaluation whose id no replica serves any more starts again on the newest."""
        for evaluation in self.queue:
            if evaluation.weight_id is not None and evaluation.weight_id not in served and evaluation.idle:
                evaluation.start_again()

    def restore(self, step: int, first_id: int) -> None:
        """The trainers start again on the weights of step `step`, and publish ids from `first_id` on. What
        was due to later steps is taken back, and what has begun on weights of later steps starts again."""
        self.queue = [e for e in self.queue if e.min_step <= step and e.label != "after"]
        self.first_id = first_id
        for evaluation in self.queue:
            if evaluation.weight_step is not None and evaluation.weight_step > step:
                evaluation.start_again()

    def results(self, evaluation: Evaluation, now: float) -> list[dict]:
        """Per file the fields of a metrics line: accuracy is pass@1 where greedy, else the mean over problems
        and samples (mean@k)."""
        scores = {number: score for p in evaluation.shares for number, score in p.scores.items()}
        lengths = {number: length for p in evaluation.shares for number, length in p.lengths.items()}
        results, first = [], 0
        for file, prompts in self._files.items():
            numbers = range(first * evaluation.samples, (first + len(prompts)) * evaluation.samples)
            first += len(prompts)
            results.append(
                {
                    "name": evaluation.name,
                    "file": file,
                    "label": evaluation.label,
                    "step": evaluation.weight_step,
                    "weight_id": evaluation.weight_id,
                    "accuracy": sum(scores[i] for i in numbers) / len(numbers),
                    "problems": len(prompts),
                    "samples": evaluation.samples,
                    "seconds": now - evaluation.started,
                    "response_length_mean": sum(lengths.get(i, 0) for i in numbers) / len(numbers),
                }
            )
        return results
