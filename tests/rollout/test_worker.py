"""The rollout role end to end: a real engine, real slots and real reward workers; the test plays the
controller and the relay."""

import asyncio
import dataclasses
import errno
import itertools
import math
import os
import queue
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch

from helpers.engines.pair import hf_logprobs, reference
from helpers.engines.replica_stand import Replica
from helpers.made import Made, stored
from helpers.processes import ended
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.line.endings import StopReceived
from laminar_hpc.line.messages.data import Partial, PromptGroup, Sample, Trajectory, VersionSpan
from laminar_hpc.line.messages.rollouts import (
    Generated,
    Grant,
    Lost,
    NotLoaded,
    RequestWork,
    Scored,
    ScoreOrder,
    WeightsAvailable,
    WeightsOpened,
)
from laminar_hpc.machine.observability.trace import TraceSpan, read_spans
from laminar_hpc.rollout import worker
from laminar_hpc.rollout.in_flight import Outcome, TrajectoryInFlight, granted
from laminar_hpc.rollout.partial_response import columns, tokens_of
from laminar_hpc.store.payload.layout import Response
from laminar_hpc.store.payload.reader import read
from laminar_hpc.weights.probe import probe_sequences

FIRST = 10  # the weight id of a replica's first weights


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    """The replicas so far, each in a folder of its own: the test after one that ended it gets another."""
    before = os.getcwd(), list(sys.path)
    replicas: list[Replica] = []
    yield replicas
    for replica in replicas:
        if not replica.ended(0):
            replica.controller.tell(StopReceived("the tests are over"))
        assert replica.ended()
        replica.writer.close()
    os.chdir(before[0])
    sys.path[:] = before[1]


@pytest.fixture
def replica(lives: list[Replica], tmp_path_factory: pytest.TempPathFactory) -> Replica:
    """A replica on weights `newest` of its first model, of which no other test has used the id. It asks for
    work and has nothing left to score or to say."""
    if not lives or lives[-1].ended(0):
        folder = tmp_path_factory.mktemp("replica")
        os.chdir(folder)  # where a user's own reward module lies
        lives.append(Replica(folder))
        lives[-1].fill(0, FIRST)
    else:
        publish(lives[-1])
    replica = lives[-1]
    (replica.folder / "gate").touch()  # which a test that failed has left closed
    replica.controller.until_asked(replica.newest)
    deadline = time.monotonic() + 60
    while replica.worker.scoring.pending:
        assert time.monotonic() < deadline, "scores of an earlier test are not there after 60 s"
        time.sleep(0.01)
    replica.controller.forget()
    return replica


def publish(replica: Replica, model: int = 0) -> int:
    """Newer weights, of `model`. Returns their id; the one below it is never published."""
    replica.publish(model, replica.newest + 2)
    return replica.newest


def open_newer(replica: Replica, model: int = 0) -> int:
    """As `publish`; returns when the replica asks for work on them."""
    weight_id = publish(replica, model)
    assert replica.controller.get(WeightsOpened).weight_id == weight_id
    replica.controller.until_asked(weight_id)
    return weight_id


def probe_logprobs(model: torch.nn.Module) -> torch.Tensor:
    """Of the probe's sequences, by transformers."""
    return torch.cat([hf_logprobs(model, sequence[:1], sequence[1:]) for sequence in probe_sequences(500)])


def test_first_weights_are_verified_before_work_is_asked_for(replica):
    """WeightsOpened with the probe's log-probs on exactly these weights, and only then RequestWork."""
    opened, asked = [m for m in replica.controller.heard if isinstance(m, WeightsOpened | RequestWork)][:2]
    assert isinstance(opened, WeightsOpened) and isinstance(asked, RequestWork)
    assert (opened.weight_id, opened.weight_step) == (FIRST, FIRST) and asked.weight_id == FIRST
    expected = probe_logprobs(reference(replica.models[0]))
    torch.testing.assert_close(torch.tensor(opened.probe_logprobs), expected, atol=1e-4, rtol=0)


def response_of(replica: Replica, trajectory: Trajectory) -> Response:
    """Of its payload file."""
    assert trajectory.place is not None
    return read(replica.folder, [(trajectory.trajectory_id, trajectory.place)])[0]


def test_a_local_batch(replica):
    """Every sample of a grant comes back once as Generated, with the engine's own log-probs and weight id,
    and once as Scored."""
    controller, weight_id = replica.controller, replica.newest
    grant = controller.grant(weight_id, groups=6, length=9, temperature=0.8)
    messages = controller.collect(48, Generated, Scored)
    generated = {m.trajectory.trajectory_id: m.trajectory for m in messages if isinstance(m, Generated)}
    scored = {m.trajectory_id: m for m in messages if isinstance(m, Scored)}
    samples = {sample.trajectory_id: group for group in grant.groups for sample in group.samples}
    assert generated.keys() == scored.keys() == samples.keys()
    assert {m.evaluation for m in messages} == {""}
    model, drawn = reference(replica.models[0]), set()
    for trajectory in generated.values():
        group, response = samples[trajectory.trajectory_id], response_of(replica, trajectory)
        tokens = response.tokens.tolist()
        assert (trajectory.group_id, trajectory.weight_id) == (group.group_id, weight_id)
        assert [(s.weight_id, s.start, s.end) for s in response.spans] == [(weight_id, 0, len(tokens))]
        assert response.loss_mask.all() and response.digest == trajectory.digest
        assert trajectory.length == trajectory.trained == len(tokens) and trajectory.policies == 1
        assert trajectory.time_started < trajectory.time_finished and trajectory.finish_reason in (
            "stop",
            "length",
        )
        expected = hf_logprobs(model, group.prompt_tokens, tokens, 0.8)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=1e-4, rtol=0)
        score = scored[trajectory.trajectory_id]
        assert score.error == "" and score.parts == {"accuracy": 1.0, "prompt": 1.0}
        assert score.reward == len(replica.worker.scoring.decoder.text(tokens))
        drawn.add(tuple(tokens))
    assert len(drawn) > 12  # four samples of a prompt are four samples
    controller.until_asked(weight_id)


def test_a_response_of_another_replica_is_scored(replica):
    """docs/promises.md#stored-when-generated: Scored with its id and attempt, by the same reward
    function; nothing is generated."""
    tokens = [5, 6, 7, 8]
    row, made = {"kind": "plain", "prompt": "another's"}, Made(4711, 9, [1, 2], tokens, [-1.0] * 4, attempt=3)
    place, group = stored(replica.folder, made).place, PromptGroup(9, [1, 2], "another's", row, [])
    replica.controller.tell(ScoreOrder(4711, 3, group, place))
    scored = replica.controller.get(Scored, Generated)
    assert isinstance(scored, Scored) and (scored.trajectory_id, scored.attempt) == (4711, 3)
    assert scored.error == "" and scored.parts == {"accuracy": 1.0, "prompt": 1.0}
    assert scored.reward == len(replica.worker.scoring.decoder.text(tokens))


def test_a_response_of_an_evaluation_is_in_no_file(replica):
    """Only its length and its score count."""
    replica.controller.grant(replica.newest, groups=1, evaluation="sampled")
    messages = replica.controller.collect(8, Generated, Scored)
    assert {m.evaluation for m in messages} == {"sampled"}
    found = [m.trajectory for m in messages if isinstance(m, Generated)]
    assert {t.place for t in found} == {None} and all(t.length for t in found)


def test_greedy_responses(replica):
    """Temperature 0: the four samples of a prompt are the same response."""
    grant = replica.controller.grant(replica.newest, groups=3, temperature=0.0)
    by_group: dict[int, set] = {}
    for message in replica.controller.collect(24, Generated, Scored):
        if isinstance(message, Generated):
            tokens = response_of(replica, message.trajectory).tokens.tolist()
            by_group.setdefault(message.trajectory.group_id, set()).add(tuple(tokens))
    assert [len(by_group[group.group_id]) for group in grant.groups] == [1, 1, 1]
    replica.controller.until_asked(replica.newest)


def test_scoring_delays_no_pull(replica):
    """A batch is done with its last token: newer weights are pulled and opened while all scores of the batch
    are still awaited."""
    controller = replica.controller
    (replica.folder / "gate").unlink()
    controller.grant(replica.newest, groups=2, kind="gated")
    controller.collect(8, Generated)
    weight_id = publish(replica, 1)
    opened = controller.get(WeightsOpened, Scored)
    assert isinstance(opened, WeightsOpened) and (opened.weight_id, opened.weight_step) == (
        weight_id,
        weight_id,
    )
    assert set(opened.parts) == {"lock", "check", "load", "sums", "probe"}
    (replica.folder / "gate").touch()
    assert {score.error for score in controller.collect(8, Scored)} == {""}
    controller.until_asked(weight_id)


def test_a_broken_reward_is_counted_and_stops_nothing(replica):
    """An exception of the user's function is a reward of 0 with its text, and the replica asks for more."""
    controller = replica.controller
    controller.grant(replica.newest, groups=1, kind="broken")
    scores = controller.collect(4, Scored)
    assert {(s.reward, s.error) for s in scores} == {(0.0, "ValueError: no such problem")}
    controller.until_asked(replica.newest)


def test_a_grant_for_other_weights_is_refused(replica):
    """Every request names the id that it expects; one for the old weights is given back, none of it is
    generated."""
    controller, old = replica.controller, replica.newest
    newer = open_newer(replica)
    controller.grant(old, groups=2)
    lost = controller.collect(8, Lost, Generated, Scored)
    assert all(
        isinstance(message, Lost) and f"weight id {old} is not allowed" in message.reason for message in lost
    )
    controller.until_asked(newer)


def test_more_than_one_version_is_lost(replica, monkeypatch):
    """docs/promises.md#one-policy: a response that the engine reports under two ids is given back with
    the reason, and is never Generated."""
    from laminar_hpc.engine.sglang import server as sglang_server

    first, other = replica.newest, replica.newest + 1

    def two_versions(replies: list, parse=sglang_server.parse_generation):
        generation = parse(replies)
        if len(generation.tokens) > 1:
            generation.spans[:] = [VersionSpan(first, 0, 1), VersionSpan(other, 1, len(generation.tokens))]
        return generation

    monkeypatch.setattr(sglang_server, "parse_generation", two_versions)
    replica.controller.grant(first, groups=1)
    messages = replica.controller.collect(4, Lost, Generated)
    said = f"weight ids [{first}, {other}] instead of {first}"
    assert all(isinstance(m, Lost) and said in m.reason for m in messages)
    monkeypatch.undo()
    replica.controller.grant(first, groups=1)
    assert all(isinstance(message, Generated) for message in replica.controller.collect(4, Lost, Generated))


def spoil_logprobs(monkeypatch: pytest.MonkeyPatch, spoilt: Callable[[int], bool]) -> None:
    """The first log-prob is not a number in the replies whose numbers `spoilt` says."""
    from laminar_hpc.engine.sglang import server as sglang_server

    numbers = itertools.count()

    def parse_spoilt(replies: list, parse=sglang_server.parse_generation):
        if spoilt(next(numbers)):
            meta = replies[0].meta_info
            meta.laminar_logprobs = struct.pack("<f", math.nan) + meta.laminar_logprobs[4:]
        return parse(replies)

    monkeypatch.setattr(sglang_server, "parse_generation", parse_spoilt)


def test_a_response_whose_logprobs_are_not_finite_is_lost_alone(replica, monkeypatch):
    """One overflow may be chance: that trajectory is given back with the reason, the others of its local
    batch are Generated."""
    spoil_logprobs(monkeypatch, lambda number: number == 2)
    replica.controller.grant(replica.newest, groups=1)
    messages = replica.controller.collect(4, Lost, Generated)
    assert sorted(type(message).__name__ for message in messages) == ["Generated"] * 3 + ["Lost"]
    assert [m.reason for m in messages if isinstance(m, Lost)] == [
        "the log-prob of response token 0 is not finite"
    ]


@pytest.mark.parametrize("role", ["all", "rollout"])
def test_a_full_disk_is_waited_for_only_where_the_run_goes_on(role, replica, monkeypatch):
    """Promise (docs/resuming.md): one torchrun ends at once, with the error of the disk; a replica of its own
    waits for room."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = dataclasses.replace(replica.worker.config, role=role)
    context = dataclasses.replace(replica.worker.context, config=config)
    payloads = worker.RolloutWorker(context, replica.new_engine, replica.worker.pool).payloads
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        written = payloads.append(b"a response")
        if role == "all":
            assert isinstance(written.exception(20), OSError)
        else:
            with pytest.raises(TimeoutError):
                written.result(2)
    payloads.close()


def test_overflows_that_are_no_chance_end_the_replica(replica, monkeypatch):
    """One trajectory that overflows again and again, or a whole local batch: never retried for ever, one line
    with the cure."""
    idle = worker.RolloutWorker(replica.worker.context, replica.new_engine, replica.worker.pool)
    groups = [PromptGroup(1, [1, 2], "", {}, [Sample(90, 0), Sample(91, 0)])]

    def overflow(work: TrajectoryInFlight) -> None:
        work.partial = Partial(*columns([1, 2], [-0.5, math.nan]), [VersionSpan(5, 0, 2)])
        idle.results.ended(work, Outcome(lost="not finite"))

    async def run(begin: list[TrajectoryInFlight]) -> None:
        for work in begin:
            overflow(work)

    def local_batch(number: int) -> None:
        idle.state.begin_pull(number, False)
        idle.state.verified(number)
        idle.state.open(number)
        asyncio.run(idle._local_batch(Grant(number, number, number, groups, 1.0, 8)))

    monkeypatch.setattr(idle.batch, "run", run)
    with pytest.raises(
        LaminarError, match=r"not finite for all 2 responses of a local batch.*weights of id 1 .*engine0\.log"
    ):
        local_batch(1)
    work = granted(Grant(2, 1, 1, groups, 1.0, 8))[0]
    overflow(work)
    with pytest.raises(LaminarError, match=r"not finite for 3 responses to one prompt \(trajectory 90\)"):
        overflow(work)
    replica.controller.collect(3, Lost)


def test_a_pull_that_fails_is_mended_by_a_fresh_engine(replica, monkeypatch):
    """The engine dies in the middle of a load: it is started from the slot, verified, and serves the new
    id."""
    real_load, killed, before = SglangServer.load_weights, [], replica.newest

    async def load_weights(self, directory, weight_id, paused):
        scheduler = replica.scheduler()
        killed.append(scheduler.pid)
        scheduler.send_signal(signal.SIGSTOP)
        scheduler.kill()
        await real_load(self, directory, weight_id, paused)

    monkeypatch.setattr(SglangServer, "load_weights", load_weights)
    weight_id = publish(replica)
    opened = replica.controller.get(WeightsOpened)
    assert (
        opened.weight_id == weight_id
        and "start" in opened.parts
        and len(killed) == 1
        and replica.scheduler().pid != killed[0]
    )
    expected = probe_logprobs(reference(replica.models[0]))
    torch.testing.assert_close(torch.tensor(opened.probe_logprobs), expected, atol=1e-4, rtol=0)
    pulls = [span.fields for span in spans_of(replica) if span.kind == "pull"]
    assert [(f["weight_id"], f["restarts"]) for f in pulls[-2:]] == [(before, 0), (weight_id, 1)]
    replica.controller.grant(weight_id, groups=2)
    assert {m.trajectory.weight_id for m in replica.controller.collect(8, Generated)} == {weight_id}


def orphans_of(replica, weight_id: int, model: torch.nn.Module, length: int) -> Grant:
    """A grant whose trajectories go on from five tokens, with the log-probs of `model` for them."""
    controller = replica.controller
    controller.batches += 1
    grant = Grant(controller.batches, weight_id, weight_id, [], 1.0, length)
    for g in range(2):
        group = PromptGroup(
            g, [(g * 31 + j) % 200 for j in range(6)], "prompt", {"kind": "", "prompt": "prompt"}, []
        )
        grant.groups.append(group)
        for i in range(2):
            group.samples.append(Sample(controller.batches * 1000 + 10 * g + i, 1))
            tokens = [(7 * i + 3 * j) % 200 for j in range(5)]
            logprobs = hf_logprobs(model, group.prompt_tokens, tokens).tolist()
            grant.parts[group.samples[-1].trajectory_id] = Partial(
                *columns(tokens, logprobs), [VersionSpan(weight_id, 0, 5)], 1.0, 1
            )
    return grant


def test_it_goes_back_to_older_weights_for_trajectories_that_began_with_them(replica):
    """docs/promises.md#one-policy: what a dead replica left goes on from its tokens under its own
    policy, loaded from a slot that still holds it and verified
    like any other; then the newest weights are pulled again."""
    controller = replica.controller
    older = open_newer(replica, 1)
    newer = open_newer(replica)
    models = [reference(path) for path in replica.models]
    grant = orphans_of(replica, older, models[1], length=12)
    controller.tell(grant)
    opened = controller.get(WeightsOpened, Generated, NotLoaded)
    assert (
        isinstance(opened, WeightsOpened)
        and (opened.weight_id, opened.weight_step) == (older, older)
        and "start" not in opened.parts
    )
    expected = probe_logprobs(models[1])
    torch.testing.assert_close(torch.tensor(opened.probe_logprobs), expected, atol=1e-4, rtol=0)
    for t in (message.trajectory for message in controller.collect(4, Generated)):
        response, n = response_of(replica, t), t.length
        tokens, before = response.tokens.tolist(), tokens_of(grant.parts[t.trajectory_id]).tolist()
        assert tokens[:5] == before and 5 < n <= 12 and (t.moves, t.attempt) == (1, 1)
        assert [(s.weight_id, s.start, s.end) for s in response.spans] == [(older, 0, n)]
        assert t.weight_id == t.weight_step == older
        [prompt] = [group.prompt_tokens for group in grant.groups if group.group_id == t.group_id]
        expected = hf_logprobs(models[1], prompt, tokens)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=1e-4, rtol=0)
    again = controller.get(WeightsOpened)
    assert again.weight_id == newer
    controller.until_asked(newer)


def test_it_says_so_when_the_older_weights_are_in_no_slot(replica):
    """Nothing is generated, and the replica asks again, with the number of the grant that came to nothing."""
    nowhere = replica.newest - 1
    grant = orphans_of(replica, nowhere, reference(replica.models[0]), length=12)
    replica.controller.tell(grant)
    said = replica.controller.get(NotLoaded, Generated, Lost, WeightsOpened)
    assert (
        isinstance(said, NotLoaded)
        and said.batch_id == grant.batch_id
        and f"weight id {nowhere} is in no slot" in said.reason
    )
    while replica.controller.requests.get(timeout=60) != RequestWork(replica.newest, grant.batch_id):
        pass


def test_older_weights_are_kept_from_the_grant_on(replica, monkeypatch):
    """Newer ones come before the replica has loaded them, as many as there are slots: none takes their place.
    And if the slot is taken away all the same, by a relay that starts anew: nothing is generated, it is said,
    and the newest weights are pulled."""
    controller, worker = replica.controller, replica.worker
    wait = worker.weights.pull
    older = open_newer(replica, 1)
    open_newer(replica)
    came: list[int] = []

    async def late(*words, **settings):
        if settings.get("back_to") == older:
            came.extend(publish(replica) for _ in range(3))
        elif came and settings.get("back_to") == came[1]:
            (worker.weights._reader.find(came[1]).directory / "manifest.json").unlink()
        await wait(*words, **settings)

    monkeypatch.setattr(worker.weights, "pull", late)
    controller.tell(orphans_of(replica, older, reference(replica.models[1]), length=8))
    assert controller.get(WeightsOpened, NotLoaded).weight_id == older
    generated = controller.collect(4, Generated, NotLoaded)
    assert {message.trajectory.weight_id for message in generated} == {older}
    assert controller.get(WeightsOpened).weight_id == came[2]
    controller.until_asked(came[2])
    gone = orphans_of(replica, came[1], reference(replica.models[0]), length=8)
    controller.tell(gone)
    said = controller.get(NotLoaded, WeightsOpened)
    assert isinstance(said, NotLoaded) and said.batch_id == gone.batch_id
    assert controller.get(WeightsOpened).weight_id == came[2]
    controller.until_asked(came[2])


def test_it_asks_for_nothing_while_a_grant_waits(replica, monkeypatch):
    """A grant that comes during a pull, as to a replica that starts, is begun first: what it was given beside
    that would find other weights open, and be lost."""
    controller, weights = replica.controller, replica.worker.weights
    older = replica.newest
    pull, grant = weights.pull, orphans_of(replica, older, reference(replica.models[0]), length=8)

    async def crossed(*words, **settings):
        if settings.get("back_to") is None and grant.batch_id not in told:
            told.append(grant.batch_id)
            controller.tell(grant)
        await pull(*words, **settings)

    told: list[int] = []
    monkeypatch.setattr(weights, "pull", crossed)
    newer = publish(replica)
    assert [controller.get(WeightsOpened, Lost).weight_id for _ in range(2)] == [newer, older]
    assert {message.trajectory.weight_id for message in controller.collect(4, Generated, Lost)} == {older}
    assert controller.requests.empty()
    assert controller.get(WeightsOpened).weight_id == newer
    controller.until_asked(newer)


def test_what_the_replica_did_is_in_its_trace(replica):
    """Spans for loads, pulls, local batches, scores and idle time, from which the report's figures are
    made."""
    controller, first = replica.controller, replica.newest
    since = time.time()
    controller.grant(first, groups=6)
    controller.collect(24, Scored)
    controller.until_asked(first)
    second = open_newer(replica)
    controller.tell(orphans_of(replica, first, reference(replica.models[0]), length=8))
    controller.until_asked(second)
    everything = spans_of(replica)
    assert {"load", "pull", "generate", "score", "wait"} <= {span.kind for span in everything}
    spans = [span for span in everything if span.t0 >= since]
    pulls = [span.fields for span in spans if span.kind == "pull"]
    assert [(f["weight_id"], f["restarts"]) for f in pulls] == [(second, 0), (first, 0), (second, 0)]
    batches = [span for span in spans if span.kind == "generate"]
    assert [span.fields["trajectories"] for span in batches] == [24, 4]
    assert batches[0].fields["tokens"] > 24


def spans_of(replica: Replica) -> list[TraceSpan]:
    """What its trace says by now."""
    return read_spans(replica.folder)["rollout0"]


def test_weights_that_the_controller_does_not_know_of_yet_wait_for_the_grant_that_may_be_on_its_way(replica):
    """A slot may be seen before the controller has heard of it: a pull then would let the grant, made for the
    weights that were open as the replica asked, find others open, and all of it be lost."""
    controller, older = replica.controller, replica.newest
    newer = older + 2
    replica.fill(1, newer)
    controller.tell(WeightsAvailable(older, older))  # so that it looks around
    with pytest.raises(queue.Empty):
        controller.get(WeightsOpened, seconds=0.5)
    controller.grant(older, groups=1)
    ended = controller.collect(4, Generated, Lost, WeightsOpened)
    assert {message.trajectory.weight_id for message in ended} == {older}
    assert controller.get(WeightsOpened, Lost).weight_id == newer
    controller.until_asked(newer)
    open_newer(replica)


def test_the_death_of_an_idle_engine_is_one_line(replica):
    """It is noticed at once, not at the next request; the error says how it died and where its log is;
    nothing stays behind."""
    engine = psutil.Process(replica.worker.engines.current.process.pid)
    family = [engine, *engine.children(recursive=True)]
    replica.scheduler().kill()
    assert replica.ended(4)
    assert isinstance(replica.error, LaminarError) and "\n" not in str(replica.error)
    assert (
        "engine 0 died" in str(replica.error)
        and "its process sglang::scheduler ended" in str(replica.error)
        and "logs/engine0.log" in str(replica.error)
    )
    assert ended(family)
