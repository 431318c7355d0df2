"""Several turns in a simulation: the rules are those of a run's own state machine, and a run with tools is
predicted from what its store, payload files and traces say of its turns."""

import dataclasses
import json
import math
import random
import tarfile
from functools import partial
from pathlib import Path

import pytest

from laminar_hpc.config.schema import EnvironmentConfig
from laminar_hpc.environments.turns.episode import TRIES
from laminar_hpc.launch import cli
from laminar_hpc.machine.observability.trace import TraceSpan
from laminar_hpc.policies.deadlines import FACTOR, FEWEST, HUNG_SECONDS
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.finished.courses import Played, taken
from laminar_hpc.simulator.finished.decode import DecodeCurve, Queue
from laminar_hpc.simulator.finished.measured import Split
from laminar_hpc.simulator.finished.turn_decode import replayed, turn_curve
from laminar_hpc.simulator.request import EngineAdmission
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.setup import SimulationSetup, setup
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.turns.course import Course, Known, Took
from laminar_hpc.simulator.turns.environments import Environments

RECORDED = Path(__file__).with_name("recorded_tools.tar.xz")
NEVER = Took(math.inf, failed=True)
FOUR = Course((10, 10, 10, 10), (5, 5, 5), (1, 1, 1), (Took(2.0),) * 3)


def environments(bound: bool = False, longest: int = 1000, **limits: float) -> Environments:
    return Environments(EnvironmentConfig(**limits), bound, 1.0, longest)


@pytest.mark.parametrize(
    ("limits", "turns"),
    [({}, 4), ({"max_turns": 2}, 2), ({"max_tool_calls": 1}, 2), ({"max_seconds": 3.0}, 2)],
)
def test_limits_are_those_of_the_episode(limits: dict[str, float], turns: int) -> None:
    """Promise: a simulated trajectory ends where a run's would: by its answer, or the limit on turns, calls
    or time, which is looked at when a turn has ended."""
    made, now = environments(**limits), 0.0
    play = made.play(FOUR, lambda tries: FOUR)
    made.reset(play, 0, now)
    ended = 0
    for turn in range(1, 5):
        play.ask(now, True)
        ended, now = turn, now + 1.0
        took = made.turned(play, 0, turn, 10, now)
        if took is None:
            break
        now += took.seconds
        made.returned(play, 0, turn, now)
        assert made.given(play, turn) == 5
    assert ended == turns and play.episode.turns == turns
    assert (play.episode.calls, play.episode.tool_seconds) == (turns - 1, 2.0 * (turns - 1))
    assert (play.episode.generate_seconds, play.tokens) == (turns, 15 * turns - 5)


def test_what_finds_no_room_ends_it() -> None:
    """What an answer gives counts in sampling.max_response_tokens, and ends a trajectory that it would
    fill."""
    made = environments(longest=15)
    play = made.play(FOUR, lambda tries: FOUR)
    made.turned(play, 0, 1, 10, 1.0)
    assert made.given(play, 1) is None and play.tokens == 10


def test_hanging_calls_are_given_up_as_in_a_run() -> None:
    """A function's is told to the model after timeout_seconds. An environment's is given up by the deadline
    that others have taught, and its trajectory begins again with other times, patiently from try three on."""
    once = Course((10, 10), (5,), (1,), (NEVER,))
    function, factory = environments(timeout_seconds=20.0), environments(bound=True, timeout_seconds=20.0)
    assert function.turned(function.play(once, lambda tries: once), 0, 1, 10, 1.0) == Took(20.0, False)
    asked: list[int] = []
    play = factory.play(once, lambda tries: asked.append(tries) or FOUR)
    assert factory.turned(play, 0, 1, 10, 1.0) == Took(20.0, True)
    for _ in range(FEWEST + 20):
        other = factory.play(FOUR, lambda tries: FOUR)
        factory.turned(other, 0, 1, 10, 0.0)
        factory.returned(other, 0, 1, 0.75)
    learnt = max(HUNG_SECONDS, FACTOR * 0.75)
    assert factory.turned(play, 0, 1, 10, 1.0) == Took(learnt, True)
    assert factory.turned(play, 1, 1, 10, 1.0) == Took(20.0, True), "each replica learns by itself"
    assert factory.failed(play, young=True) and asked == [2] and play.course is FOUR
    play.course, play.tries, play.failures = once, TRIES, TRIES - 1
    assert factory.turned(play, 0, 1, 10, 1.0) == Took(20.0, True)
    assert not factory.failed(play, young=True) and play.tries == 1
    play.course = once
    assert factory.turned(play, 0, 1, 10, 1.0) == Took(20.0, True), "at the next replica too"
    assert not factory.failed(play, young=False), "the end of a local batch waits for no new try"


def small(known: Known, limits: EnvironmentConfig, pipeline: str = "laminar") -> SimulationSetup:
    """Two replicas, 16 groups of 4, four steps."""
    work = WorkloadConfig(
        prompts_per_step=16,
        samples_per_prompt=4,
        updates_per_step=2,
        prompt_tokens=20,
        max_response_tokens=9999,
    )
    gpu = GPUS["H800"]
    made = partial(setup, PIPELINES[pipeline], MODELS["7B"], gpu, 1, [(gpu, 2, 1, None)], work, DEFAULT)
    return dataclasses.replace(made(steps=4, warmup_steps=0), known=known, limits=limits)


def test_environments_that_fail_are_retried_and_all_is_trained() -> None:
    """Promise: trajectories whose environments hang or fail begin again, here or elsewhere, and every batch
    is trained; what was drawn in vain is counted; the same seed gives the same."""
    draw = random.Random(0)
    groups = [[Course((50,) * n, (7,) * (n - 1), (1,) * (n - 1), ()) for n in (1, 2, 3, 5)]]
    good = [Took(draw.lognormvariate(0.0, 1.0)) for _ in range(90)]
    known = Known(groups, [*good, *[NEVER] * 3, *[Took(1.0, failed=True)] * 7], [Took(0.5)])
    bound = EnvironmentConfig(factory="a.B", timeout_seconds=30.0)
    broken, again = simulate(small(known, bound)).figures, simulate(small(known, bound)).figures
    fine = simulate(small(dataclasses.replace(known, calls=good), bound)).figures
    assert broken == again
    assert broken["retries_mean"] > 0 == fine["retries_mean"]
    assert broken["discarded_tokens"] > 0 == fine["discarded_tokens"]
    mean = 20 + sum(57 * n - 7 for n in (1, 2, 3, 5)) / 4
    for figures in (broken, fine):
        assert figures["tokens_per_step"] == pytest.approx(64 * mean)
        assert figures["wait_seconds_mean"] >= 0.5
    assert broken["tokens_per_second"] < fine["tokens_per_second"]
    told = simulate(small(known, EnvironmentConfig(tools=["a.b"], timeout_seconds=30.0))).figures
    assert told["retries_mean"] == 0 and told["tool_seconds_mean"] > fine["tool_seconds_mean"]


def test_a_replica_whose_requests_only_wait_is_emptied() -> None:
    """Promise: repack sees a replica as the live controller does: one whose trajectories all wait for their
    tools is in its ramp-down, though nothing of its KV cache is freed."""
    known = Known([[Course((20, 20), (5,), (1,), ())] * 4], [Took(300.0)], [])
    limits = EnvironmentConfig(tools=["a.b"], timeout_seconds=1000.0)
    made = small(known, limits)
    assert simulate(made).figures["trajectories_moved"] > 0


def test_a_known_curve_of_turns_is_found() -> None:
    """Promise: the curve comes out of the begins and ends of turns, whatever the others do meanwhile."""
    true = DecodeCurve(0.0, 0.002, 0.0003, 2e-7, 2e-3, 0.05)
    of = Queue(10, 1 << 20, 256, EngineAdmission.of(4096, DEFAULT))
    draw, batches = random.Random(0), []
    for _ in range(8):
        courses = []
        for _ in range(32):
            n = draw.randint(1, 5)
            drawn = tuple(draw.randint(20, 120) for _ in range(n))
            took = tuple(Took(draw.lognormvariate(-1, 1)) for _ in range(n - 1))
            courses.append(Course(drawn, (15,) * (n - 1), (1,) * (n - 1), took))
        played = [Played(i, i // 4, course, ()) for i, course in enumerate(courses)]
        turns = replayed(played, true, of, 30.0)
        batches.append([dataclasses.replace(p, turns=tuple(t)) for p, t in zip(played, turns, strict=True)])
    found = turn_curve(batches, of)
    assert (found.step, found.token) == pytest.approx((true.step, true.token), rel=0.1)
    assert (found.ask, found.prefill) == pytest.approx((true.ask, true.prefill), rel=0.25)
    ends = [max(t[-1][1] for t in replayed(batch, found, of, 30.0)) for batch in batches]
    assert ends == pytest.approx([max(p.turns[-1][1] for p in batch) for batch in batches], rel=0.03)


def test_what_never_returned_is_told_from_what_was_slow() -> None:
    """From a run's traces: calls and resets apart, with those that were given up and those that failed."""
    spans = [
        TraceSpan("tool", 0.0, 2.0, {"what": "look"}),
        TraceSpan("tool", 0.0, 30.0, {"what": "look"}),
        TraceSpan("tool", 0.0, 5.0, {"what": "look", "failed": "hung"}),
        TraceSpan("tool", 0.0, 1.0, {"what": "look", "failed": "failed"}),
        TraceSpan("tool", 0.0, 0.5, {"what": "reset"}),
    ]
    calls, resets = taken(spans, EnvironmentConfig(timeout_seconds=30.0))
    assert calls == [Took(2.0), Took(math.inf), NEVER, Took(1.0, failed=True)] and resets == [Took(0.5)]


def test_a_recorded_run_with_tools_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: of experiment=tools, 10 steps of 4 groups with a real engine and a real trainer, tokens/s and
    the time of a trajectory are predicted within 10%, and where its time goes within two points."""
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    assert cli.run(["sim", str(tmp_path / "recorded_tools"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    a, b = found["happened"], found["simulated"]
    assert b["tokens_per_second"] == pytest.approx(a["tokens_per_second"], rel=0.1)
    for share in ("trainer_wait_share", "rollout_idle_share"):
        assert b[share] == pytest.approx(a[share], abs=0.1)
    happened, simulated = (Split(**figures["split"]) for figures in (a, b))
    assert simulated.seconds == pytest.approx(happened.seconds, rel=0.1)
    assert simulated.shares == pytest.approx(happened.shares, abs=0.02)
    assert found["measured"]["turns"]["calls"] > 200 and a["split"]["tool"] > 0
