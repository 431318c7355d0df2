"""Who is granted what, against a plain pass: each replica without work in the order of asking, each with a
look at all groups."""

import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.control.plain_admission import plain_may_go_on
from helpers.control.script import Script
from helpers.emulated.stand import small_config
from laminar_hpc.controller import snapshot
from laminar_hpc.controller.loop import Controller
from laminar_hpc.controller.trajectories import dispatcher
from laminar_hpc.line.messages.data import Sample
from laminar_hpc.line.messages.rollouts import Grant, Lost, RequestWork, WeightsOpened
from laminar_hpc.line.messages.training import StepDone, TakeBatch
from laminar_hpc.policies import admission
from laminar_hpc.policies.live_groups import GroupView
from laminar_hpc.policies.sampling import worth_a_batch

FIRST, PER_STEP, LOCAL, REPLICAS = 2, 3, 2, 4

Expected = list[tuple[int, dict[int, list[int]], int]]  # replica, samples of granted groups, new groups


def plain_pass(c: Controller, opened_for: set[int]) -> Expected:
    """`opened_for`: replicas that may take a batch of the round, changed as live."""
    config, newest, grants = c.config, c.weights.newest, Expected()
    bound, waiting = config.pipeline.max_staleness, c.replicas.waiting
    if c.state.stops_here or c.state.trainer_done or newest is None:
        return grants
    views = {group.group_id: group.view() for group in c.tracker.groups.values()}
    weights = {
        g.group_id: {i: s.weight_step for i, s in g.samples.items()} for g in c.tracker.groups.values()
    }
    samples = [(g, i, s) for g in c.tracker.groups.values() for i, s in g.samples.items()]
    idle, counted = {replica: waiting.weight_id(replica) for replica in waiting}, c.tracker.counted
    mine: dict[int, list[int]] = {}
    for group, i, sample in samples:
        if sample.is_open:
            mine.setdefault(group.group_id, []).append(i)
    for replica, weight_id in list(idle.items()):
        machine = c.members.at("rollout", replica).hello.machine
        if not c.weights.is_newest_on(machine, weight_id):
            continue
        if config.pipeline.refresh == "barrier":
            if all(idle.get(each) == newest.weight_id for each in c.active_replicas.replicas()):
                opened_for.clear()
                opened_for.update(each for each, i in idle.items() if i == newest.weight_id)
            if replica not in opened_for:
                continue
        step = c.weights.steps[weight_id]
        quota = admission.quota(step, counted, PER_STEP, config.steps, bound)
        ready = sum(map(len, mine.values())) / FIRST
        scoring = any(s.generated and s.replica == replica for _, _, s in samples)
        if not worth_a_batch(quota + ready, LOCAL, scoring):
            continue
        room, again = LOCAL * FIRST, dict[int, list[int]]()
        for group_id in sorted(mine, key=lambda i: (views[i].weight_step, i)):
            rule = (step, c.state.trainer_step, views.values(), PER_STEP, bound, c.state.groups_taken)
            if room > 0 and plain_may_go_on(views[group_id], *rule):
                again[group_id] = mine.pop(group_id)
                room -= len(again[group_id])
                weights[group_id].update(dict.fromkeys(again[group_id], step))
                oldest = min(weights[group_id].values())
                views[group_id] = views[group_id]._replace(weight_step=oldest)
        new = max(0, min(-(-room // FIRST), quota))
        for number in range(new):
            views[-counted - number - 1] = GroupView(-counted - number - 1, 0, step, False)
        counted += new
        if again or new:
            grants.append((replica, again, new))
            opened_for.discard(replica)
            del idle[replica]
    return grants


class Compared:
    """In the place of the dispatcher's `dispatch`."""

    def __init__(self, controller: Controller) -> None:
        self.controller, self.real = controller, controller.dispatcher.dispatch
        self.opened_for, self.grants = set[int](), 0
        controller.dispatcher.dispatch = self  # type: ignore[method-assign]

    def __call__(self) -> None:
        c = self.controller
        expected, known = plain_pass(c, self.opened_for), c.tracker._next_group
        before = len(c.outbox._messages)
        self.real()
        sent = [(i, m) for i, m in c.outbox._messages[before:] if isinstance(m, Grant)]
        found: Expected = []
        for identity, grant in sent:
            again = {
                g.group_id: [s.trajectory_id for s in g.samples] for g in grant.groups if g.group_id < known
            }
            found.append((int(identity.split(":")[1]), again, len(grant.groups) - len(again)))
        assert found == expected
        self.grants += len(found)


class World:
    """Replicas on two machines, whose relays get weights at different times."""

    def __init__(self, folder: Path, refresh: str, bound: int | None) -> None:
        rules = {"refresh": refresh, "max_staleness": bound, "local_batch_groups": LOCAL, "repack": "off"}
        config = small_config(folder, REPLICAS, steps=50, prompts=PER_STEP, **rules)
        config.algorithm.first_samples = FIRST
        config.algorithm.zero_variance = "filter"
        self.script = Script(config)
        self.compared = Compared(self.script.controller)
        self.script.relay(1, "two")
        self.work: dict[int, list[Grant]] = {replica: [] for replica in range(REPLICAS)}
        self.batch: dict[int, int | None] = {}
        self.lives = [0] * REPLICAS
        self.unscored: list[tuple[int, str, Sample]] = []
        for replica in range(REPLICAS):
            self.script.rollout(replica, self.machine(replica), self.life(replica))
        self.publish(0, 2)
        self.script.hear("trainer", 0, TakeBatch(0))

    def machine(self, replica: int) -> str:
        return "one" if replica < 2 else "two"

    def life(self, replica: int) -> str:
        return str(self.lives[replica])

    def publish(self, step: int, which: int) -> None:
        """Received by relay 0, relay 1 or both."""
        self.script.publish(step, *([0, 1] if which == 2 else [which]))

    def hears(self) -> None:
        for replica in range(REPLICAS):
            if grant := self.script.granted(replica, self.life(replica)):
                self.work[replica].append(grant)
                self.batch[replica] = grant.batch_id

    def happens(self, event: str, number: int) -> None:
        script, replica = self.script, number % REPLICAS
        life, work = self.life(replica), self.work[replica]
        if event == "ask" and not work:
            newest = script.controller.weights.newest_on(self.machine(replica))
            script.asks(replica, newest.weight_id if newest else 0, self.batch.get(replica), life)
        elif event in ("generate", "lose") and work:
            grant = work[0]
            group = grant.groups[-1]
            sample = group.samples.pop()
            if event == "lose":
                script.hear("rollout", replica, Lost(sample.trajectory_id, sample.attempt, "x"), life=life)
            else:
                self.generates(replica, grant, group.group_id, sample)
            if not group.samples:
                grant.groups.pop()
            if not grant.groups:
                work.pop(0)
        elif event == "score" and self.unscored:
            scorer, scorers_life, sample = self.unscored.pop(number % len(self.unscored))
            right = float(number % 3 == 0)
            script.scores(scorer, sample.trajectory_id, sample.attempt, scorers_life, right)
        elif event == "publish":
            self.publish(script.state().trainer_step, number % 3)
        elif event == "train":
            step, batches = script.state().trainer_step, script.batches()
            script.hub.left["trainer:0:"] = []
            if any(batch.step == step for batch in batches):
                times = {"trajectories": 1.0, "wait_seconds": 0.1, "train_seconds": 0.1}
                script.hear("trainer", 0, StepDone(step, times))
                self.publish(step + 1, number % 3)
                script.hear("trainer", 0, TakeBatch(step + 1))
        elif event == "die":
            self.compared.opened_for.discard(replica)  # its next life waits for the next round
            script.dies(replica, life)
            self.lives[replica] += 1
            self.work[replica].clear()
            self.batch.pop(replica, None)
            self.unscored = [each for each in self.unscored if each[0] != replica]
            script.rollout(replica, self.machine(replica), self.life(replica))
        self.hears()

    def generates(self, replica: int, grant: Grant, group_id: int, sample: Sample) -> None:
        (whole,) = [g for g in grant.groups if g.group_id == group_id]
        samples, whole.samples = whole.samples, [sample]
        rest, grant.groups = grant.groups, [whole]
        self.script.ends(replica, grant, 3, self.life(replica), scores=False)
        grant.groups, whole.samples = rest, samples
        self.unscored.append((replica, self.life(replica), sample))


EVENTS = st.sampled_from(["ask", "ask", "generate", "generate", "generate", "score", "score", "train"])
RARE = st.sampled_from(["lose", "publish", "die"])


@settings(max_examples=5, deadline=None)
@given(
    events=st.lists(st.tuples(EVENTS | EVENTS | EVENTS | RARE, st.integers(0, 11)), min_size=20, max_size=80),
    refresh=st.sampled_from(["drained", "drained", "barrier"]),
    bound=st.sampled_from([0, 1, 2]),
)
@example(events=[("die", 2), ("ask", 2), ("lose", 0), ("lose", 0)], refresh="barrier", bound=0)
def test_grants_are_those_of_a_pass_over_all_replicas(events, refresh, bound):
    """docs/promises.md#turns: whatever replicas, relays and the trainer do, and in rounds too."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), refresh, bound)
        for replica in range(REPLICAS):
            world.happens("ask", replica)
        for event, number in events:
            world.happens(event, number)
        assert world.compared.grants
        world.script.closes()


def test_large_grants_are_spread_over_turns(tmp_path, monkeypatch):
    """docs/promises.md#turns: a turn gives out so many samples, in the order of asking; the next one
    goes on at once."""
    monkeypatch.setattr(dispatcher, "_SAMPLES_AT_ONCE", 1)
    config = small_config(tmp_path, replicas=REPLICAS, steps=50, refresh="drained", max_staleness=2)
    script = Script(config)
    for replica in range(REPLICAS):
        script.rollout(replica)
    weight_id, waits, poll = script.publish(0, 0), [], script.hub.poll
    monkeypatch.setattr(script.hub, "poll", lambda seconds: waits.append(seconds) or poll(seconds))
    opened = WeightsOpened(weight_id, 0, 0.1, {}, [], 0.0)
    for replica in (2, 0, 3, 1):
        said = (opened, RequestWork(weight_id))
        script.hub.arrived += [(f"rollout:{replica}:", message) for message in said]
    granted = []
    for _ in range(REPLICAS + 1):
        script.controller.turn()
        granted.append([r for r in range(REPLICAS) if script.granted(r)])
    assert granted == [[2], [0], [3], [1], []]
    assert [seconds == 0 for seconds in waits] == [False, True, True, True, False]
    script.closes()


def test_the_status_looks_at_no_list_that_grows_with_the_run(tmp_path):
    """docs/promises.md#turns: it is made once a second, for each rank."""

    class Passed(dict):
        def __iter__(self):
            raise AssertionError("a pass over all weight ids")

    script = Script(small_config(tmp_path))
    assert _shown(script) == [("relay", None, None), ("trainer", None, None)]
    for step in range(3):
        script.publish(step, 0)
    script.controller.weights.steps = Passed(script.controller.weights.steps)
    assert _shown(script) == [("relay", 2, 2), ("trainer", 2, 2)]
    script.closes()
    later = Script(script.controller.config, restored_step=2)
    assert _shown(later) == [("relay", None, None), ("trainer", 2, 2)]
    later.closes()


def _shown(script: Script) -> list[tuple[str, int | None, int | None]]:
    ranks = snapshot.status(script.controller).ranks
    return [(rank.role, rank.weight_id, rank.weight_step) for rank in ranks]
