"""The staleness bound of a simulated run: that of its rules, or with `adaptive` what policies/staleness.py
makes of its trainer's waits."""

import math

from laminar_hpc.policies import admission
from laminar_hpc.policies.live_groups import LiveGroups
from laminar_hpc.policies.staleness import FIRST, AdaptiveBound, StepBounds, WaitWatch
from laminar_hpc.simulator.rules import Rules


class SimulatedBound:
    def __init__(self, rules: Rules, groups_per_step: int) -> None:
        self.rules = rules
        self.groups_per_step = groups_per_step
        self.steps: StepBounds | None = None
        if rules.adaptive and rules.whole_staleness is not None:
            self.policy = AdaptiveBound(FIRST, rules.whole_staleness)
            self.steps = StepBounds(self.policy.bound)
            self.watch = WaitWatch()

    @property
    def of_choice(self) -> int | StepBounds | None:
        """By which the trainer takes groups. With the AReaL rule (interrupt) admission alone bounds
        staleness: the first finished is the first trained."""
        return None if self.rules.refresh == "interrupt" else self.steps or self.rules.whole_staleness

    def quota(self, weight_step: int, counted: int, steps: int) -> int:
        """Groups that a replica with weights of this step may be granted; a fractional bound adds a part of a
        batch to the whole one below."""
        bound = self.rules.max_staleness
        whole = None if bound is None else math.floor(bound)
        if self.steps is not None:
            whole = self.steps.at(weight_step)
        elif bound is not None and whole is not None:
            counted -= int((bound - whole) * self.groups_per_step)
        return admission.quota(weight_step, counted, self.groups_per_step, steps, whole)

    def batches(self, weight_step: int) -> float:
        """Batches that may be in flight beside that of the trainer."""
        return self.steps.at(weight_step) if self.steps else self.rules.max_staleness or 0

    def waits(self, now: float, step: int, groups: LiveGroups, size: int, counted: int) -> None:
        """The trainer has got nothing at `now`."""
        if self.steps is not None:
            held = admission.bound_holds_back(step, groups, size, counted, self.groups_per_step, self.steps)
            self.watch.look(now, waits=True, held=held)

    def taken(self, now: float, step: int, groups: LiveGroups, left: int) -> None:
        """The trainer has its groups, which are `groups` no more; `left` are still to come for its step."""
        if self.steps is not None:
            size = self.groups_per_step
            self.watch.taken(now, admission.bound_to_spare(step, groups, size, self.steps, left))

    def step_done(self, now: float, step: int) -> None:
        """`step` is the one that begins; its weights are not published yet."""
        if self.steps is not None:
            if seen := self.watch.step_done(now):
                self.policy.after(seen)
            self.steps.decide(step + 1, self.policy.bound)
