"""The trainer's process: takes what `policies.admission.choose` gives, trains for as long as its costs say,
publishes, checkpoints.

waits for                           unblocked by
groups that `choose` takes          Rollouts.finish -> poke
weights at the relays / replicas    its own publication -> Rollouts.weights_available
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from laminar_hpc.policies import admission
from laminar_hpc.simulator.bounds import SimulatedBound
from laminar_hpc.simulator.clock import Clock
from laminar_hpc.simulator.setup import SimulationSetup
from laminar_hpc.simulator.tracker import SimulatedTracker
from laminar_hpc.simulator.trainer_cost import logprob_seconds, updates_seconds

if TYPE_CHECKING:
    from laminar_hpc.simulator.rollouts import Rollouts


class Trainer:
    def __init__(self, clock: Clock, tracker: SimulatedTracker, setup: SimulationSetup) -> None:
        self.clock = clock
        self.tracker = tracker
        self.setup = setup
        self.costs = setup.job
        self.rules = setup.rules
        self.groups_per_step = setup.workload.prompts_per_step
        self.bound = SimulatedBound(setup.rules, self.groups_per_step)
        updates = setup.workload.updates_per_step
        self.parts = updates if self.rules.consumption == "stream" else 1
        self.updates_per_part = updates // self.parts
        self.random = np.random.default_rng([setup.seed, 1])
        self.rollouts: Rollouts  # set by the rollouts themselves
        self.step = 0
        self.waiting_since: float | None = 0.0
        self.taken = 0
        self.part = 0
        self.seconds: dict[str, float] = {}
        self.step_ends: list[float] = []
        self.step_tokens: list[int] = []
        self.tokens = 0
        self.since_checkpoint = 0.0
        self.delay = 0.0
        self.ends_at = -1.0  # when the part in progress ends, or did
        self.shortest = self.updates_per_part * self.costs.update  # seconds that a part takes at least
        self.spans: list[tuple[str, float, float]] = []
        self.on_step: Callable[[int], None] = lambda step: None  # called at the end of each step
        self.finish_step: Callable[[], None] = self.end_step  # called when its last update is done

    def book(self, kind: str, start: float, end: float) -> None:
        if end > start:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + end - start
            self.spans.append((kind, start, end))

    def poke(self) -> None:
        """Called when something has finished. Begins the next batch or mini-batch if the policy gives one."""
        if self.waiting_since is None:
            return
        # the parts of a step add up to its groups
        size = (self.part + 1) * self.groups_per_step // self.parts - self.taken
        now, views, bound = self.clock.now, self.tracker.views, self.bound
        choice = admission.choose(self.step, views, self.groups_per_step, bound.of_choice, self.taken, size)
        if not choice.group_ids:
            return bound.waits(now, self.step, views, size, self.tracker.counted)
        self.book("wait", self.waiting_since, now)
        self.waiting_since = None
        tokens = self.tracker.consume(choice.group_ids, self.step)
        self.taken += len(choice.group_ids)
        bound.taken(now, self.step, views, self.groups_per_step - self.taken)
        self.part += 1
        self.tokens += sum(tokens)
        handling = self.costs.overlapped_handling if self.rules.overlapped else self.costs.handling
        seconds = len(tokens) * handling + self.updates_per_part * self.costs.update
        seconds += logprob_seconds(tokens, self.costs, self.setup.layout)
        seconds += updates_seconds(tokens, self.updates_per_part, self.costs, self.setup.layout, self.random)
        if self.rules.placement == "colocated":
            seconds += self.costs.switch
            self.rollouts.start_training()
        self.ends_at = now + seconds
        self.clock.at(self.ends_at, self._trained, now, seconds)

    def ends_after(self, now: float) -> float:
        """No step ends between `now` and this time."""
        return self.ends_at if self.ends_at >= now else now + self.shortest

    def fail(self, down: float) -> None:
        """Restores the last checkpoint: `down` seconds, and what was trained since, again; keeps versions."""
        self.delay += down + self.since_checkpoint
        if self.waiting_since is not None:
            now = self.clock.now
            self.book("wait", self.waiting_since, now)
            self.waiting_since = None
            self.clock.at(now, self._recover, now)

    def _recover(self, start: float) -> None:
        """Goes on waiting after a failure."""
        if self.delay:
            delay = self.delay
            self.delay = 0.0
            self.clock.after(delay, self._recover, start)
            return
        self.book("down", start, self.clock.now)
        self.waiting_since = self.clock.now
        self.poke()

    def _trained(self, start: float, seconds: float) -> None:
        if self.delay:
            delay = self.delay
            self.delay = 0.0
            self.book("down", self.clock.now, self.clock.now + delay)
            self.clock.after(delay, self._trained, start, seconds)
            return
        self.book("train", start, start + seconds)
        self.since_checkpoint += seconds
        if self.part < self.parts:
            self.waiting_since = self.clock.now
            self.poke()
            return
        self.finish_step()

    def end_step(self) -> None:
        now = self.clock.now
        self.step += 1
        self.bound.step_done(now, self.step)
        self.taken = self.part = 0
        self.step_ends.append(now)
        self.step_tokens.append(self.tokens)
        self.tokens = 0
        self.on_step(self.step)
        if self.step >= self.setup.steps:
            self.clock.running = False
            return
        stall = 0.0
        if self.rules.placement == "colocated":
            self.rollouts.weights_available(self.step)
        elif self.rules.relays:
            stall = self.costs.publish_stall
            self.clock.after(stall + self.costs.chain, self.rollouts.weights_available, self.step)
        else:
            stall = self.rollouts.global_sync_seconds
            self.rollouts.weights_available(self.step)
        self.book("publish", now, now + stall)
        saving = self.costs.checkpoint if self.step % self.setup.checkpoint_every == 0 else 0.0
        if saving:
            self.book("checkpoint", now + stall, now + stall + saving)
            self.since_checkpoint = 0.0
        self.clock.after(stall + saving, self._ready)

    def _ready(self) -> None:
        self.waiting_since = self.clock.now
        self.poke()
