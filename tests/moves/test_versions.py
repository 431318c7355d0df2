"""refresh=versions with real controller, workers, sockets and moves around emulated engines: replicas never
drain, each trajectory has one policy, and the staleness bound holds."""

import random
import time
from functools import partial

import pytest

from helpers.control.script import Script, samples_of
from helpers.emulated.stand import Stand, assert_every_one_ended_once, small_config
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.loop import Controller
from laminar_hpc.line.messages.chain import RelayHas
from laminar_hpc.line.messages.data import ReplicaLoad, Trajectory
from laminar_hpc.line.messages.membership import Ping
from laminar_hpc.line.messages.moves import Reserve
from laminar_hpc.line.messages.rollouts import Grant, Leaving, RequestWork, WeightsOpened
from laminar_hpc.report import rundata
from laminar_hpc.rollout.worker import RolloutWorker
from laminar_hpc.simulator.emulated.engine import EmulatedEngine


def config(folder, bound: int = 2, **changes: object) -> RunConfig:
    made = small_config(folder, refresh="versions", max_staleness=bound, **changes)
    made.model.lora.rank = 8
    return made


def assert_kept_its_promises(made: RunConfig) -> list[Trajectory]:
    """One policy for each trajectory, none staler than the bound; the audit has passed before."""
    found = list(assert_every_one_ended_once(made).values())
    assert {t.policies for t in found} == {1}
    consumed = rundata.load(made.run_dir).consumed
    assert max(t.staleness_training for t in consumed) <= (made.pipeline.max_staleness or 0)
    return found


class HeldAtOnce:
    """Ids on which a replica had trajectories at one moment: called after each turn of the controller."""

    def __init__(self) -> None:
        self.most = 0

    def __call__(self, controller: Controller) -> None:
        holders = controller.tracker.groups.holders
        for replica in holders.generating_counts():
            ids = {sample.weight_id for _, _, sample in holders.generating(replica)}
            self.most = max(self.most, len(ids))


def test_new_work_begins_beside_old_trajectories_and_each_keeps_its_policy(tmp_path):
    """A replica begins groups on a newer adapter while trajectories of an older one go on in it; all of them
    end once and whole, with one policy, within the bound; no more adapters stay than can be needed."""
    made, seen = config(tmp_path, replicas=2, steps=5), HeldAtOnce()
    stand = Stand(made, each_turn=seen)
    stand.run(120)
    assert len({t.weight_id for t in assert_kept_its_promises(made)}) > 1
    assert seen.most > 1


class Disturbance:
    """After each turn of the controller: moves of trajectories by chance to whoever holds their id, and the
    deaths of replicas that generate on two ids."""

    def __init__(self, stand: Stand, kills: int, seed: int) -> None:
        self.stand, self.kills, self.random = stand, kills, random.Random(seed)
        self.moved = self.killed = 0
        self._next = self._next_kill = 0.0

    def __call__(self, controller: Controller) -> None:
        now = time.monotonic()
        if now < self._next or controller.state.trainer_done:
            return
        self._next = now + 0.05
        holders, moving = controller.tracker.groups.holders, controller.migration.moving
        owned = {replica: holders.generating(replica) for replica in holders.generating_counts()}
        rooms = {(room.replica, room.weight_id) for room in controller.failover.rooms()}
        for source in owned:
            for _, i, sample in owned[source]:
                able = [r for r, weight_id in rooms if weight_id == sample.weight_id and r != source]
                if able and i not in moving and self.random.random() < 0.02:
                    destination = self.random.choice(sorted(able))
                    controller.migration.begin(
                        i, sample.attempt, source, destination, sample.weight_id, 500, now
                    )
                    self.moved += 1
        for replica, owns in owned.items():
            several = len({sample.weight_id for _, _, sample in owns}) > 1
            if several and self.killed < self.kills and now > self._next_kill:
                self._next_kill = now + 0.5
                self.killed += self.stand.kill(replica, {i for _, i, _ in owns})


@pytest.mark.slow
@pytest.mark.parametrize("increments, seed", [(25, 0), (0, 1)])
def test_deaths_and_moves_change_no_policy(tmp_path, increments, seed):
    """docs/promises.md#one-policy and #nothing-lost: replicas with trajectories on two ids die, others move
    about; all end once and whole on the weights that they began with, within the bound. What was known of a
    dead replica's trajectories goes on."""
    made = config(tmp_path, bound=3, replicas=3, steps=15, repack="kv")
    made.rollout.increment_tokens = increments
    made.relay.slots = 5
    made.emulation.time_scale = 10.0
    stand = Stand(made)
    disturbance = stand.each_turn = Disturbance(stand, kills=3, seed=seed)
    stand.run(240)
    assert_kept_its_promises(made)
    assert disturbance.killed == 3 and disturbance.moved > 10
    moves = rundata.load(tmp_path / "run").records.get("move", [])
    assert [move for move in moves if move["source"] is not None]
    rescued = [move for move in moves if move["source"] is None]
    assert bool(rescued) or not increments


@pytest.mark.slow
def test_a_load_that_fails_beside_what_runs_loses_nothing(tmp_path):
    """The engine cannot be trusted any more, and others are generated in it: it is started again, and what it
    generated goes on elsewhere or from its prompt; all end once, within the bound."""
    failed = []

    class Failing(EmulatedEngine):
        async def load_adapter(self, directory, weight_id):
            if self._jobs and not failed:
                failed.append(weight_id)
                raise LaminarError("the adapter does not load")
            return await super().load_adapter(directory, weight_id)

    def worker(context, pool):
        engine = partial(Failing, context.config, context.index, context.run_dir)
        return RolloutWorker(context, engine, pool)

    made = config(tmp_path, replicas=2, steps=6)
    made.rollout.increment_tokens = 25
    Stand(made, new_worker=worker).run(120)
    assert_kept_its_promises(made)
    hung = rundata.load(tmp_path / "run").records.get("engine_hung", [])
    assert len(hung) == len(failed) == 1
    assert all("does not load; it is started again" in record["reason"] for record in hung)


# ---- message by message ------------------------------------------------------------------------------------


def new(tmp_path, replicas: int = 2, slots: int = 4, **changes: object) -> Script:
    made = config(tmp_path, replicas=replicas, steps=8, prompts=4, samples=2, **changes)
    made.rollout.increment_tokens = 50
    made.relay.slots = slots
    return Script(made)


def reports(script: Script, index: int, held: list[int], in_flight: int, free: int = 5_000) -> None:
    """Its ping: it generates so many on these ids, with so many free tokens of KV."""
    load = ReplicaLoad("draining", held[-1], in_flight, 0, kv_capacity=10_000, kv_tokens=10_000 - free)
    load.held = held
    script.hear("rollout", index, Ping(load))


def opens(script: Script, index: int, weight_id: int, room: int) -> Grant | None:
    """It has loaded these weights beside what it generates, and asks for more; what it is granted."""
    step = script.controller.weights.steps[weight_id]
    asks = RequestWork(weight_id, script.newest_batch(index), room)
    script.hear("rollout", index, WeightsOpened(weight_id, step, 0.1, {}, [], 0.0), asks)
    return script.granted(index)


def on_two_ids(script: Script, tokens: int = 60) -> tuple[Grant, Grant]:
    """Replica 0 generates on ids 0 and 1, so many tokens of each so far; admission has nothing for others."""
    script.publish(0, 0)
    script.rollout(0)
    old = opens(script, 0, 0, room=4)
    script.publish(1, 0)
    young = opens(script, 0, 1, room=64)
    assert old is not None and young is not None
    for grant in (old, young):
        script.works(0, grant, tokens)
    script.grants_nothing_new()
    return old, young


def test_a_grant_is_on_the_newest_id_and_within_the_room(tmp_path):
    """The replica has not drained: what it began goes on, and new groups are for as many trajectories as it
    has room for, at most a local batch."""
    script = new(tmp_path)
    old, young = on_two_ids(script)
    assert (old.weight_id, len(samples_of(old))) == (0, 4) and young.weight_id == 1
    assert 0 < len(samples_of(young)) <= 64
    assert script.state().generating == {0: len(samples_of(old)) + len(samples_of(young))}
    script.ends(0, young, 80)
    script.ends(0, old, 80)
    ended = {whole.record.trajectory_id: whole.record.weight_id for whole in script.finished()}
    assert ended == {i: grant.weight_id for grant in (old, young) for i in samples_of(grant)}


def test_who_asked_before_newer_weights_came_waits_for_them(tmp_path):
    """It is about to load them beside what it generates, and asks again: new work is never on an older id
    than its machine has."""
    script = new(tmp_path)
    script.publish(0, 0)
    script.rollout(0)
    assert opens(script, 0, 0, room=2) is not None
    script.grants_nothing_new()
    assert opens(script, 0, 0, room=4) is None
    script.publish(1, 0)
    script.grants_nothing_new(False)
    script.controller.turn()
    assert script.granted(0) is None
    later = opens(script, 0, 1, room=4)
    assert later is not None and later.weight_id == 1


def test_a_dead_replicas_trajectories_go_to_whoever_holds_their_ids(tmp_path):
    """Each is asked for on its own id, also of a replica that asks for work; what comes on one id takes the
    room of all."""
    script = new(tmp_path)
    old, young = on_two_ids(script)
    script.rollout(1)
    assert opens(script, 1, 1, room=64) is None
    reports(script, 1, [0, 1], in_flight=1)
    script.dies(0)
    asked = {r.trajectory_id: r.weight_id for r in script.sent(1, Reserve)}
    assert asked == {i: grant.weight_id for grant in (old, young) for i in samples_of(grant)}


def test_what_nobody_holds_is_loaded_from_the_ring_beside_newer_work(tmp_path):
    """The one that asks has id 1 alone, and its relay's ring both: of id 0 it gets a grant with the tokens so
    far, and asks for more after it; nothing is thrown away."""
    script = new(tmp_path)
    old, young = on_two_ids(script)
    script.rollout(1)
    assert opens(script, 1, 1, room=64) is None
    reports(script, 1, [1], in_flight=1)
    script.dies(0)
    assert {r.trajectory_id for r in script.sent(1, Reserve)} == set(samples_of(young))
    rescue = script.granted(1)
    assert rescue is not None and rescue.weight_id == 0
    assert samples_of(rescue) == {i: attempt + 1 for i, attempt in samples_of(old).items()}
    assert {part.count for part in rescue.parts.values()} == {60}
    assert script.state().discarded == 0


def test_what_a_full_replica_holds_waits_for_its_room(tmp_path):
    """Replica 1 holds id 0 and is full; replica 2 asks, and its machine never had that id. Nothing starts
    again from its prompt: it waits, and goes on where it is held as soon as there is room."""
    script = new(tmp_path, replicas=3)
    script.relay(1, "two")
    old, _ = on_two_ids(script)
    script.rollout(1)
    opens(script, 1, 1, room=0)
    reports(script, 1, [0, 1], in_flight=8, free=0)
    script.hear("relay", 1, RelayHas(1, 1, 1, 0.1, 0.0))
    script.rollout(2, machine="two")
    assert opens(script, 2, 1, room=64) is None
    script.controller.replicas.waiting.leave(1)
    script.dies(0)
    script.controller.turn()
    assert script.state().discarded == 0 and not script.sent(1, Reserve)
    reports(script, 1, [0, 1], in_flight=8, free=5_000)
    assert {r.trajectory_id for r in script.sent(1, Reserve)} >= set(samples_of(old))
    assert script.state().discarded == 0


def test_who_leaves_gives_each_trajectory_to_a_holder_of_its_id(tmp_path):
    """A replica that was told to end has trajectories on two ids; the other one holds the newer alone."""
    script = new(tmp_path)
    _, young = on_two_ids(script)
    script.rollout(1)
    opens(script, 1, 1, room=64)
    reports(script, 0, [0, 1], in_flight=8)
    reports(script, 1, [1], in_flight=1)
    script.hear("rollout", 0, Leaving())
    asked = {r.trajectory_id: r.weight_id for r in script.sent(1, Reserve)}
    assert asked == {i: 1 for i in samples_of(young)}


def test_shares_of_an_evaluation_stay_on_its_id(tmp_path):
    """An evaluation that has begun on id 0 is gone on with by a replica that asks on id 1 and holds id 0
    still."""
    made = config(tmp_path, replicas=2, steps=8, prompts=4, samples=2)
    made.evaluation.files, made.evaluation.problems = [made.data.train], 4
    made.evaluation.samples = 0
    script = Script(made)
    script.publish(0, 0)
    script.rollout(0)
    script.rollout(1)
    first = opens(script, 0, 0, room=64)
    assert first is not None and first.evaluation and first.weight_id == 0
    script.publish(1, 0)
    reports(script, 1, [0, 1], in_flight=1)
    second = opens(script, 1, 1, room=64)
    assert second is not None and (second.evaluation, second.weight_id) == (first.evaluation, 0)
