"""Local batches for replicas without work: what dead replicas left behind, then evaluations, then what
admission allows.

    replica --WeightsOpened, RequestWork--> `dispatch`, each tick -> Grant
"""

import time

from laminar_hpc.controller.fleet.active_replicas import ActiveReplicas
from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.tables import Tables
from laminar_hpc.controller.trajectories.failover import Failover, Rescue
from laminar_hpc.controller.weights.probes import Probes
from laminar_hpc.controller.weights.weight_ids import Weights
from laminar_hpc.line.messages.data import Partial, PromptGroup
from laminar_hpc.line.messages.rollouts import Grant, RequestWork, WeightsOpened
from laminar_hpc.machine.observability import console
from laminar_hpc.policies import admission
from laminar_hpc.policies.live_groups import GroupView
from laminar_hpc.policies.rounds import Rounds
from laminar_hpc.policies.sampling import worth_a_batch
from laminar_hpc.policies.waiting_line import Kind

# that the grants of a turn may have, some 30 ms of it; the next turn begins at once with what is left
_SAMPLES_AT_ONCE = 2048


class Dispatcher:
    """Called when weights are opened, when work is asked for, and at each tick."""

    def __init__(
        self,
        tables: Tables,
        weights: Weights,
        failover: Failover,
        probes: Probes,
        active_replicas: ActiveReplicas,
        first_batch: int,
    ) -> None:
        """`first_batch`: the id of the next local batch; no earlier controller has given it."""
        self._shared = tables
        self._config = tables.config
        self._state = tables.state
        self._tracker = tables.tracker
        self._evaluations = tables.evaluations
        self._replicas = tables.replicas
        self._weights = weights
        self._failover = failover
        self._probes = probes
        self._active_replicas = active_replicas
        barrier = self._config.pipeline.refresh == "barrier"
        self._rounds = Rounds() if barrier else None
        self._several = self._config.pipeline.refresh == "versions"
        self._held = set[int]()  # ids that evaluations may go on with
        self._next_batch = first_batch
        self._local_batch = 1
        self._resets = bool(self._config.environment.factory)  # a row's environment takes its time to begin
        self._asked: set[int] = set()  # replicas whose newest request was not looked at yet
        self._looked: tuple[object, ...] = ()  # what the last look for a round saw
        self._more = False  # whether the last look has left some work for the next turn

    # ---- what replicas say ---------------------------------------------------------------------------------

    def on_weights_opened(self, member: Member, opened: WeightsOpened) -> None:
        replica, weight_id = member.hello.index, opened.weight_id
        if self._replicas.at(replica).weight_id is None:
            text = f"replica {replica} serves weight id {weight_id}"
            self._shared.say(console.setup_line(text, self._state.seconds))
        self._replicas.serves(replica, weight_id)
        self._replicas.pull_seconds = opened.seconds
        self._active_replicas.opened(replica)
        self._failover.opened(replica, weight_id)
        fields = {"replica": replica, "weight_id": weight_id, "step": opened.weight_step}
        self._shared.metrics.write("pull", **fields, seconds=opened.seconds, parts=opened.parts)
        who = f"rollout{replica}"
        self._probes.without(who, opened.model_logprobs)
        self._probes.scored(weight_id, opened.weight_step, who, opened.probe_logprobs)

    def on_request_work(self, member: Member, request: RequestWork) -> None:
        self._replicas.asks(member.hello.index, request)
        self._asked.add(member.hello.index)

    def replica_lost(self, replica: int) -> None:
        self._tracker.upcoming.release(replica)
        if self._rounds:
            self._rounds.leave([replica])

    # ---- what they get -------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Costs as much as there are grants, kinds of waiting replicas and events since the last time; ends
        with the grant that reaches _SAMPLES_AT_ONCE."""
        self._more = False
        samples = 0
        self._held = self._replicas.held() if self._evaluations and self._several else set()
        if self._evaluations and (served := self._replicas.served()):
            self._evaluations.reset_stranded({*served, *self._held})
        if self._state.stops_here:
            return
        self._local_batch = self._active_replicas.local_batch_groups
        self._look_for_a_round()
        if not self._state.trainer_done:
            while (rescue := self._failover.next_rescue(self._next_batch)) is not None:
                self._grant(rescue.replica, self._rescue_grant(rescue))
        self._update_line()
        line, steps = self._replicas.waiting, self._weights.steps
        for replica in line.in_turn(self._has_work):
            if samples >= _SAMPLES_AT_ONCE:
                self._more = True
                break
            weight_id = line.weight_id(replica)
            if weight_id is None or self._shared.members.at("rollout", replica) is None:
                continue
            grant = self._evaluation_grant(replica, weight_id, steps[weight_id])
            grant = grant or self._training_grant(replica, weight_id, steps[weight_id])
            if grant is not None:
                self._grant(replica, grant)
                samples += sum(len(group.samples) for group in grant.groups)

    def take_more(self) -> bool:
        """Whether there is more to give out at once; asked once a turn."""
        more = self._more
        self._more = False
        return more

    def _update_line(self) -> None:
        """Takes out who knows of newer weights: it pulls and asks again. One at another place, which would
        wait for the answer, is given work on them, and loads them with it (rollout/asking.py)."""
        line, holders, members = self._replicas.waiting, self._tracker.groups.holders, self._shared.members
        for replica in holders.take_turned() | self._asked:
            line.scores(replica, holders.scores(replica))
        told = {m.hello.index for place in self._weights.take_news() for m in members.on(place, "rollout")}
        look_at = told | self._asked
        self._asked = set()
        for replica in look_at:
            member, weight_id = members.at("rollout", replica), line.weight_id(replica)
            if weight_id is None:
                continue
            if member is None or weight_id not in self._weights.steps:
                self._asked.add(replica)  # it gets nothing before they are known
            elif self._weights.is_newest_on(member.hello.machine, weight_id):
                continue
            elif member.hello.place and self._config.pipeline.refresh == "drained":
                newest = self._weights.newest_on(member.hello.machine)
                line.ask(replica, newest.weight_id if newest else weight_id)
            else:
                line.leave(replica)

    def _has_work(self, kind: Kind) -> bool:
        """Whether a replica of that kind may get any."""
        weight_id, scores = kind
        step = self._weights.steps.get(weight_id)
        if step is None:
            return False
        evaluations = self._evaluations
        if evaluations is not None and evaluations.has_work(weight_id, step):
            return True
        if evaluations is not None and any(evaluations.goes_on_with(i) for i in self._held):
            return True
        return self._may_train(step, scores)

    def _grant(self, replica: int, grant: Grant) -> None:
        self._next_batch = grant.batch_id + 1
        self._replicas.granted(replica, grant.batch_id)
        self._shared.outbox.send(self._shared.members.at("rollout", replica), grant)

    def _rescue_grant(self, rescue: Rescue) -> Grant:
        """What is rescued; a replica that need not load weights first also gets what admission allows."""
        step, groups = self._weights.steps[rescue.weight_id], rescue.groups
        if self._replicas.at(rescue.replica).weight_id == rescue.weight_id:
            more = self._training_grant(rescue.replica, rescue.weight_id, step)
            groups = groups + (more.groups if more is not None else [])
        return self._sampled(rescue.weight_id, step, groups, rescue.parts)

    def _sampled(
        self, weight_id: int, step: int, groups: list[PromptGroup], parts: dict[int, Partial]
    ) -> Grant:
        length, temperature = self._config.sampling.max_response_tokens, self._config.sampling.temperature
        return Grant(self._next_batch, weight_id, step, groups, temperature, length, parts=parts)

    def _evaluation_grant(self, replica: int, weight_id: int, step: int) -> Grant | None:
        evaluations, now = self._evaluations, time.time()
        if evaluations is None:
            return None
        grant = evaluations.grant(replica, weight_id, step, self._next_batch, now)
        for older in self._replicas.at(replica).held:
            if grant is None and evaluations.goes_on_with(older):
                grant = evaluations.grant(replica, older, self._weights.steps[older], self._next_batch, now)
        return grant

    def _quota(self, step: int) -> int:
        """New groups that a replica on weights of trainer step `step` may have."""
        config = self._config
        size, bound = config.algorithm.prompts_per_step, self._shared.staleness.of_weights(step)
        return admission.quota(step, self._tracker.counted, size, config.steps, bound)

    def _may_go_on(self, group: GroupView, step: int) -> bool:
        """Whether samples of a group may be generated with weights of trainer step `step`."""
        config, state, live = self._config, self._state, self._tracker.groups.live
        size, bound = config.algorithm.prompts_per_step, self._shared.staleness.bounds
        return admission.may_go_on(group, step, state.trainer_step, live, size, bound, state.groups_taken)

    def _may_train(self, step: int, scores: bool) -> bool:
        """Whether admission and the pipeline's rounds leave anything for replicas on weights of trainer step
        `step`, some of whose responses are not scored yet if it `scores`."""
        if self._state.trainer_done or (self._rounds is not None and not self._rounds.is_open):
            return False
        quota, tracker = self._quota(step), self._tracker
        being_scored = scores and tracker.may_change and not self._several  # nobody's next batch is closed
        if not worth_a_batch(quota + tracker.open_in_groups, self._local_batch, being_scored):
            return False
        oldest = tracker.oldest_open()
        return quota > 0 or (oldest is not None and self._may_go_on(oldest, step))

    def _training_grant(self, replica: int, weight_id: int, step: int) -> Grant | None:
        """What admission and the pipeline's rounds allow a replica on weights of trainer step `step`."""
        tracker = self._tracker
        if not self._may_train(step, tracker.groups.holders.scores(replica)):
            return None
        if self._rounds is not None and not self._rounds.may_begin(replica):
            return None
        where, now, room = (replica, weight_id, step), time.time(), self._replicas.at(replica).room
        size = self._local_batch if room is None else min(self._local_batch, tracker.groups_in(room))
        groups = tracker.draw(
            size, self._quota(step), *where, now, lambda group: self._may_go_on(group, step)
        )
        if self._rounds is not None and groups:
            self._rounds.took(replica)
        if not groups:
            return None
        grant = self._sampled(weight_id, step, groups, {})
        if self._resets:
            grant.ahead = tracker.ahead(replica, self._local_batch)
        return grant

    def _look_for_a_round(self) -> None:
        """Opens the next one when all are ready, if anything has changed since the last look."""
        newest, active_replicas, line = self._weights.newest, self._active_replicas, self._replicas.waiting
        if self._rounds is None or newest is None:
            return
        replicas = active_replicas.replicas()
        now = (newest.weight_id, line.changes, active_replicas.minimum, replicas)
        if now == self._looked or line.count(newest.weight_id) < len(replicas):
            return
        self._looked = now
        idle = {replica: line.weight_id(replica) for replica in line}
        self._rounds.look(idle, newest.weight_id, replicas, active_replicas.minimum)
