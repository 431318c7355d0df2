"""Local batches for replicas without work: what dead replicas left behind, then evaluations, then what
admission allows.

    replica --WeightsOpened, RequestWork--> `dispatch`, each tick -> Grant
"""

import time

from laminar_hpc.controller.crew import Crew
from laminar_hpc.controller.evaluations import Evaluations
from laminar_hpc.controller.members import Member
from laminar_hpc.controller.probes import Probes
from laminar_hpc.controller.replicas import Replicas
from laminar_hpc.controller.rescuer import Rescue, Rescuer
from laminar_hpc.controller.shared import Shared
from laminar_hpc.controller.tracker import TrajectoryTracker
from laminar_hpc.controller.weights import Weights
from laminar_hpc.messages.data import Partial, PromptGroup
from laminar_hpc.messages.rollouts import Grant, RequestWork, WeightsOpened
from laminar_hpc.observability import console
from laminar_hpc.policies import admission
from laminar_hpc.policies.rounds import Rounds
from laminar_hpc.policies.sampling import worth_a_batch


class Dispatcher:
    def __init__(
        self,
        shared: Shared,
        tracker: TrajectoryTracker,
        evaluations: Evaluations | None,
        replicas: Replicas,
        weights: Weights,
        rescuer: Rescuer,
        probes: Probes,
        crew: Crew,
        first_batch: int,
    ) -> None:
        """`first_batch`: the id of the next local batch; no earlier controller has given it."""
        self._shared, self._config, self._state = shared, shared.config, shared.state
        self._tracker, self._evaluations, self._replicas = tracker, evaluations, replicas
        self._weights, self._rescuer, self._probes, self._crew = weights, rescuer, probes, crew
        barrier = self._config.pipeline.refresh == "barrier"
        self._rounds = Rounds() if barrier else None
        self._next_batch, self._local_batch = first_batch, 1

    # ---- what replicas say ---------------------------------------------------------------------------------

    def on_weights_opened(self, member: Member, opened: WeightsOpened) -> None:
        replica, weight_id = member.hello.index, opened.weight_id
        row = self._replicas.at(replica)
        if row.weight_id is None:
            text = f"replica {replica} serves weight id {weight_id}"
            self._shared.say(console.setup_line(text, self._state.seconds))
        row.weight_id, self._replicas.pull_seconds = weight_id, opened.seconds
        self._crew.opened(replica)
        self._rescuer.opened(replica, weight_id)
        fields = {"replica": replica, "weight_id": weight_id, "step": opened.weight_step}
        self._shared.metrics.write("pull", **fields, seconds=opened.seconds, parts=opened.parts)
        self._probes.scored(weight_id, opened.weight_step, f"rollout{replica}", opened.probe_logprobs)

    def on_request_work(self, member: Member, request: RequestWork) -> None:
        self._replicas.asks(member.hello.index, request)

    def replica_lost(self, replica: int) -> None:
        if self._rounds:
            self._rounds.leave([replica])

    # ---- what they get -------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        if self._evaluations and (served := self._replicas.served()):
            self._evaluations.reset_stranded(served)
        if self._state.stops_here:
            return
        self._local_batch = self._crew.local_batch_groups
        if not self._state.trainer_done:
            while (rescue := self._rescuer.next_rescue(self._next_batch)) is not None:
                self._grant(rescue.replica, self._rescue_grant(rescue))
        for replica, request in list(self._replicas.waiting.items()):
            member = self._shared.members.at("rollout", replica)
            step = self._weights.steps.get(request.weight_id)
            if member is None or step is None:
                continue
            if not self._weights.is_newest_on(member.hello.machine, request.weight_id):
                del self._replicas.waiting[replica]  # it knows of newer weights: it pulls and asks again
                continue
            grant = self._evaluation_grant(replica, request.weight_id, step)
            grant = grant or self._training_grant(replica, request.weight_id, step)
            if grant is not None:
                self._grant(replica, grant)

    def _grant(self, replica: int, grant: Grant) -> None:
        self._next_batch = grant.batch_id + 1
        self._replicas.granted(replica, grant.batch_id)
        self._shared.outbox.send(self._shared.members.at("rollout", replica), grant)

    def _rescue_grant(self, rescue: Rescue) -> Grant:
        """What is rescued, and along with it what admission gives to a replica that need not load first."""
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
        if self._evaluations is None:
            return None
        return self._evaluations.grant(replica, weight_id, step, self._next_batch, time.time())

    def _training_grant(self, replica: int, weight_id: int, step: int) -> Grant | None:
        """What admission and the pipeline's rounds allow a replica on weights of trainer step `step`."""
        if self._state.trainer_done or not self._round_is_open(replica):
            return None
        config, tracker, local_batch = self._config, self._tracker, self._local_batch
        size, bound = config.algorithm.prompts_per_step, config.pipeline.max_staleness
        quota = admission.quota(step, tracker.counted, size, config.steps, bound)
        waiting, scoring = tracker.ready(replica)
        if not worth_a_batch(quota + waiting, local_batch, scoring and tracker.may_change):
            return None

        def may_go_on(group: admission.GroupView) -> bool:
            trainer_step, taken = self._state.trainer_step, self._state.groups_taken
            return admission.may_go_on(group, step, trainer_step, tracker.views(), size, bound, taken)

        if self._rounds:
            self._rounds.took(replica)
        groups = tracker.draw(local_batch, quota, replica, weight_id, step, time.time(), may_go_on)
        return self._sampled(weight_id, step, groups, {}) if groups else None

    def _round_is_open(self, replica: int) -> bool:
        newest, crew = self._weights.newest, self._crew
        if self._rounds is None:
            return True
        return newest is not None and self._rounds.may_begin(
            replica, self._replicas.waiting_on(), newest.weight_id, crew.replicas(), crew.minimum
        )
