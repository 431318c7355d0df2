"""The staleness bound of each set of weights: fixed, or with pipeline.max_staleness=auto as decided by
policies/staleness.py from the trainer's waits. A decision is in the store before anything is granted by it.

TakeBatch without a batch, each tick -> `trainer_waits`
StepDone of step s - 1               -> the bound of the weights of step s + 1, which nobody has yet
"""

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.policies import admission
from laminar_hpc.policies.live_groups import LiveGroups
from laminar_hpc.policies.staleness import FIRST, AdaptiveBound, StepBounds, WaitWatch
from laminar_hpc.store.store import Store


class StalenessControl:
    """`bounds`: None without a bound."""

    def __init__(self, config: RunConfig, store: Store) -> None:
        most = config.pipeline.staleness_max
        self._store = store
        self._size = config.algorithm.prompts_per_step
        self._watch = WaitWatch()
        self._policy: AdaptiveBound | None = None
        self.bounds: StepBounds | None = None
        if most is not None:
            first = min(FIRST, most) if config.pipeline.adapts_staleness else most
            self.bounds = StepBounds(first, store.bounds())
        if most is not None and self.bounds and config.pipeline.adapts_staleness:
            self._policy = AdaptiveBound(self.bounds.newest, most)

    def of_weights(self, step: int) -> int | None:
        """The bound of the weights of this step; None = none."""
        return None if self.bounds is None else self.bounds.at(step)

    def trainers_start(self, step: int) -> None:
        """They go on from `step`, with a wait that no bound could spare them."""
        self._watch = WaitWatch()
        self._decide(step)
        self._decide(step + 1)

    def trainer_waits(self, now: float, step: int, groups: LiveGroups, size: int, counted: int) -> None:
        """At `now`, in monotonic seconds, there are not `size` groups for step `step`."""
        if self._policy and self.bounds:
            held = admission.bound_holds_back(step, groups, size, counted, self._size, self.bounds)
            self._watch.look(now, waits=True, held=held)

    def trainer_takes(self, now: float, step: int, groups: LiveGroups, left: int) -> None:
        """It has its groups, which are `groups` no more; `left` are still to come for its step."""
        if self._policy and self.bounds:
            spare = admission.bound_to_spare(step, groups, self._size, self.bounds, left)
            self._watch.taken(now, spare)

    def step_done(self, now: float, step: int) -> None:
        """The trainer begins `step`, whose weights are on their way."""
        seen = self._watch.step_done(now)
        if self._policy and seen:
            self._policy.after(seen)
        self._decide(step + 1)

    def figures(self) -> dict[str, int]:
        """For the line of a step: the bound of the newest weights that have one of their own."""
        return {"staleness_bound": self.bounds.newest} if self._policy and self.bounds else {}

    def _decide(self, step: int) -> None:
        if self._policy and self.bounds:
            bound = self.bounds.decide(step, self._policy.bound)
            if bound is not None:
                self._store.note_bound(step, bound)
