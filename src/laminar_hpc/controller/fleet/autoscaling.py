"""rollout.replicas=MIN:MAX: asks for replicas when the trainer waits for them, and lets go of some when they
have no work, as policies/scaling.py decides from what the run measures.

    StepDone -> the window of the run -> a decision, with the gain that it predicts
        more:  the starter (replica_starter.py) is asked; each newcomer counts from its first weights on
        fewer: a replica without work gets nothing more, then Release; it leaves as at a TERM, with nothing in
               hand; when it has left the starter lets go of its place
    what the run makes after a change, once it has settled, is recorded beside what was predicted

Replicas that die below MIN are replaced. A replica is never taken from its work, so no token is lost. A place
on which several replicas stand is let go with the last of them.
"""

import time
from collections import deque
from dataclasses import dataclass

from laminar_hpc.controller.fleet.active_replicas import ActiveReplicas
from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.fleet.replica_starter import ReplicaStarter, start_limit
from laminar_hpc.controller.fleet.run_window import RunWindow
from laminar_hpc.controller.fleet.scale_program import PAUSE_SECONDS_MAX, FailedCall
from laminar_hpc.controller.tables import Tables
from laminar_hpc.controller.training import Training
from laminar_hpc.line.messages.membership import Release
from laminar_hpc.machine.observability import console
from laminar_hpc.policies.scaling import Costs, Decision, Scaling

WINDOW_STEPS = 5
GAIN_WINDOWS = 2  # after a change, over which its gain is measured
RELEASE_STEPS = 8  # for replicas to be without work, else the decision lapses
_LOOK_SECONDS = 1.0  # between two looks at all members
_PAUSE_SECONDS = 30.0  # after a replica that was started and died; twice as long each time
_DRAIN_SECONDS = 20.0  # of a replica that leaves, before one has been seen


@dataclass
class _Change:
    """A decision whose gain is being measured."""

    decision: Decision
    before: int
    step: int
    tokens: float = 0.0
    seconds: float = 0.0
    windows: int = 0


class Autoscaling:
    """Called at each tick."""

    def __init__(
        self, tables: Tables, training: Training, active_replicas: ActiveReplicas, starter: ReplicaStarter
    ) -> None:
        config = tables.config
        self._shared = tables
        self._training = training
        self._active_replicas = active_replicas
        self.starter = starter
        self.starter.here = self._here
        self._start_limit = start_limit(config)
        self._begun = time.monotonic()
        self._policy = Scaling(config.rollout.fewest, config.rollout.most)
        self._window = RunWindow(tables)
        self._settling = 1 + (min(config.pipeline.staleness_max or 0, 3))
        self._skips = self._settling  # steps that tell nothing
        self._trainers = ""
        self._record: dict = {}  # the newest step seen
        self._looked = 0.0
        self._known = frozenset[int]()
        self._complete = False  # MIN replicas have been there
        self._starter_ids: dict[int, str] = {}  # of all who are there
        self._served: set[int] = set()  # of them, those that have served weights
        self._asked: deque[float] = deque()  # when, one for each replica that is to come
        self._not_before = 0.0
        self._pause = _PAUSE_SECONDS
        self._to_release = 0
        self._release_steps = 0
        self._released: dict[int, float] = {}  # since when
        self._start_seconds = 0.0
        self._drain_seconds = _DRAIN_SECONDS
        self._change: _Change | None = None

    def tick(self, now: float) -> None:
        """`now`: monotonic seconds. Costs a pass over all members once a second."""
        state = self._shared.state
        for said in self.starter.look():
            if isinstance(said, FailedCall):
                self._call_failed(said)
            else:
                self._shared.say(console.line("replicas", said.text))
        if state.trainer_done or state.stopping:
            return
        if (replicas := self._active_replicas.replicas()) is not self._known:
            self._replicas_changed(replicas, now)
        self._window.look(now, len(replicas))
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            self._look(now)
        if self._training.newest_record is not self._record:
            self._record = self._training.newest_record
            self._step(self._record, now)
        if self._to_release:
            self._release_idle(now)

    # ---- who is there --------------------------------------------------------------------------------------

    def _replicas_changed(self, replicas: frozenset[int], now: float) -> None:
        """Some serve weights, or serve them no more."""
        for _ in replicas - self._known - self._served:
            if self._asked:
                self._start_seconds = now - self._asked.popleft()
                self._pause = _PAUSE_SECONDS
            elif not self._known:  # of those that begin with the run
                self._start_seconds = self._shared.state.seconds
        lost = self._known - replicas - self._released.keys()
        self._to_release = max(0, self._to_release - len(lost))
        self._served |= replicas
        self._known = replicas
        self._complete |= len(replicas) >= self._policy.fewest
        self._skips = self._settling
        self._window.begin()

    def _look(self, now: float) -> None:
        """Notices who has left, and who does not come."""
        members = {member.hello.index: member for member in self._shared.members.all("rollout")}
        before = self._starter_ids
        self._starter_ids = {replica: _starter_id(member) for replica, member in members.items()}
        for replica in before.keys() - members.keys():
            if (since := self._released.pop(replica, None)) is not None:
                self._drain_seconds = now - since
                if before[replica] not in self._here():
                    self.starter.stop(before[replica])
            elif replica not in self._served and self._asked:
                self._asked.popleft()
                self._wait_longer(now)
            self._served.discard(replica)
        limit = self._start_limit
        self._complete |= now - self._begun > limit  # under another controller, or they never come
        if late := sum(now - asked > limit for asked in self._asked):
            text = f"{late} that were asked for {limit:.0f} s ago have not come"
            self._shared.say(console.line("replicas", text))
            for _ in range(late):
                self._asked.popleft()
            self._wait_longer(now)
        missing = self._policy.fewest - len(self._known) - len(self._asked)
        if missing > 0 and self._complete and now >= self._not_before:
            self._shared.say(console.line("replicas", f"{missing} fewer than there are to be: asked for"))
            self._ask(missing, now)

    def _ask(self, count: int, now: float) -> None:
        self._asked.extend([now] * count)
        self.starter.start(count)

    def _wait_longer(self, now: float) -> None:
        self._not_before = now + self._pause
        self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)

    def _here(self) -> set[str]:
        return set(self._starter_ids.values())

    def close(self, replaced: bool) -> None:
        """The controller ends. The run goes on after a signal, which is the end of its job's time, and under
        another controller that has `replaced` it."""
        self.starter.close(is_final=not (replaced or self._shared.state.stopping.startswith("SIG")))

    def _call_failed(self, failed: FailedCall) -> None:
        more = "" if failed.started or not failed.final else "; end it yourself"
        self._shared.say(console.line("replicas", f"{failed.text}{more}"))
        self._shared.metrics.write("scale_failed", reason=failed.text, replicas=failed.started)
        for _ in range(min(failed.started, len(self._asked))):
            self._asked.pop()
        if failed.started:
            self._wait_longer(time.monotonic())

    # ---- decisions -----------------------------------------------------------------------------------------

    def _step(self, record: dict, now: float) -> None:
        """A step is done: of a number of replicas that has settled, it counts."""
        trainers, evaluations = self._shared.state.trainer_generation, self._shared.evaluations
        if trainers != self._trainers or (evaluations is not None and evaluations.queue):
            self._trainers = trainers
            self._skips = self._settling
        self._release_steps += 1
        if self._to_release and self._release_steps > RELEASE_STEPS:  # they have work after all
            self._to_release = 0
        if self._skips or self._asked or self._to_release:
            self._skips = max(0, self._skips - 1)
            return self._window.begin()
        self._window.step(record)
        if self._window.steps < WINDOW_STEPS or now < self._not_before:
            return None
        count = len(self._known)
        window = self._window.take(count)
        if self._change is not None:
            self._change.tokens += window.tokens
            self._change.seconds += window.seconds
            self._change.windows += 1
            if self._change.windows == GAIN_WINDOWS:
                self._measured(count)
        left = (self._shared.config.steps - self._shared.state.trainer_step) * window.seconds / window.steps
        costs = Costs(left, self._start_seconds, self._drain_seconds)
        if window.tokens and count and (decision := self._policy.decide(window, costs)):
            self._decided(decision, count, now)
        return None

    def _decided(self, decision: Decision, count: int, now: float) -> None:
        if self._change is not None and self._change.windows:
            self._measured(count)
        rates, window, step = decision.rates, decision.rates.window, self._shared.state.trainer_step
        self._change = _Change(decision, count, step)
        self._shared.metrics.write(
            "scaling",
            step=step,
            before=count,
            target=decision.target,
            predicted_gain=decision.gain,
            tokens_per_second=window.throughput,
            predicted_tokens_per_second=window.throughput * (1.0 + decision.gain),
            trainer_tokens_per_second=rates.demand,
            replica_tokens_per_second=rates.supply,
            trainer_wait_share=window.waited / window.seconds,
            replica_idle_share=window.idle,
            start_seconds=self._start_seconds,
            drain_seconds=self._drain_seconds,
        )
        why = f"trainer waits {window.waited / window.seconds:.0%}, replicas idle {window.idle:.0%}"
        text = f"{count} -> {decision.target}: {why}; {decision.gain:+.0%} tokens/s predicted"
        self._shared.say(console.line("replicas", text))
        if decision.target > count:
            self._ask(decision.target - count, now)
        else:
            self._to_release = count - decision.target
            self._release_steps = 0

    def _measured(self, count: int) -> None:
        """The gain of the last change, by what the run has made since: beside the predicted one of as many
        replicas as there are."""
        assert self._change is not None
        change, found = self._change, self._change.decision.rates
        self._change = None
        if count == change.before:  # nobody has come, or left
            return
        predicted = found.throughput(count) / found.throughput(change.before) - 1.0
        gain = change.tokens / change.seconds / found.window.throughput - 1.0
        self._shared.metrics.write(
            "scaled",
            step=change.step,
            before=change.before,
            replicas=count,
            predicted_gain=predicted,
            measured_gain=gain,
            tokens_per_second=change.tokens / change.seconds,
        )
        text = f"{change.before} -> {count}: {gain:+.0%} tokens/s measured, {predicted:+.0%} predicted"
        self._shared.say(console.line("replicas", text))

    # ---- fewer ---------------------------------------------------------------------------------------------

    def _release_idle(self, now: float) -> None:
        """Lets go of replicas that wait for work and have nothing in hand, the newest first."""
        shared, holders = self._shared, self._shared.tracker.groups.holders
        if shared.evaluations is not None and shared.evaluations.queue:
            return
        for replica in sorted(shared.replicas.waiting, reverse=True)[: self._to_release]:
            member = shared.members.at("rollout", replica)
            if member is None or holders.generating(replica):
                continue
            self._to_release -= 1
            self._released[replica] = now
            shared.replicas.leaves(replica)
            shared.outbox.send(member, Release())
            shared.say(console.line("replicas", f"{member.name} is let go"))


def _starter_id(member: Member) -> str:
    """By what a user's own program knows it."""
    hello = member.hello
    return hello.starter_id or f"{hello.machine.partition('/')[0]}:{hello.pid}"
