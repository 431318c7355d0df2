"""docs/promises.md#outlives-its-controller: the trainers are done, and the last evaluation is made,
whoever dies before it or in the middle of it; message by message."""

import time
from pathlib import Path

import pytest

from helpers.control.script import Script
from helpers.emulated.stand import small_config
from helpers.made import trajectory
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.data import PromptGroup, Sample
from laminar_hpc.line.messages.membership import Failure
from laminar_hpc.line.messages.rollouts import Generated, Grant, Lost, Scored
from laminar_hpc.line.messages.training import Restored, TrainerDone
from laminar_hpc.machine.files import jsonl

PROBLEMS = 4


def configuration(folder: Path) -> RunConfig:
    """Of a run whose only step is done when its trainer says Restored(1)."""
    config = small_config(folder, replicas=1, steps=1)
    config.evaluation.files, config.evaluation.problems = [config.data.train], PROBLEMS
    config.evaluation.samples = 0
    return config


def trained(config: RunConfig) -> Script:
    script = Script(config, restored_step=1)
    script.publish(1, 0)
    script.hear("trainer", 0, TrainerDone(1))
    return script


def asks(script: Script, life: str) -> Grant:
    """What the replica gets that has the newest weights."""
    grant = script.joins(0, script.newest, life=life)
    assert grant is not None and grant.evaluation == "after-greedy-1"
    return grant


def answers(script: Script, grant: Grant, life: str, count: int = PROBLEMS) -> None:
    """So many of its problems."""
    both: list[tuple[PromptGroup, Sample]] = [(g, s) for g in grant.groups for s in g.samples]
    for group, sample in both[:count]:
        generated = Generated(trajectory(group, sample, grant.weight_id, grant.weight_step), grant.evaluation)
        scored = Scored(sample.trajectory_id, sample.attempt, 1.0, {}, "", 1.0, grant.evaluation)
        script.hear("rollout", 0, generated, scored, life=life)


def evaluated(config: RunConfig) -> list[tuple[str, int, float]]:
    lines = jsonl.read(Path(config.run_dir) / "metrics.jsonl", "evaluation")
    return [(line["label"], line["step"], line["accuracy"]) for line in lines]


def test_the_controller_dies_before_the_last_evaluation_and_in_it(tmp_path: Path) -> None:
    """Its roles go on: the trainers, who are gone, are not awaited; what was scored is not asked again."""
    config = configuration(tmp_path)
    trained(config).closes()

    script = Script(config, trainer=False)
    assert script.state().trainer_done and not script.state().finished
    script.relay_holds(0, 1)
    grant = asks(script, "a")
    assert len(grant.groups) == PROBLEMS
    answers(script, grant, "a", count=3)
    script = script.again(trainer=False)
    script.relay_holds(0, 1)
    grant = asks(script, "b")
    assert len(grant.groups) == 1
    answers(script, grant, "b")
    assert script.state().finished and evaluated(config) == [("after", 1, 1.0)]
    script.closes()


@pytest.mark.parametrize("scored", [0, 3])
def test_all_die_before_the_last_evaluation_and_in_it(tmp_path: Path, scored: int) -> None:
    """The trainers start again only to publish, and say again that they are done."""
    config = configuration(tmp_path)
    script = trained(config)
    answers(script, asks(script, "a"), "a", count=scored)
    script = script.again(trainer=False)
    script.trainer("next", Restored(1))
    assert not script.state().trainer_done
    script.publish(1, 0, life="next")
    script.hear("trainer", 0, TrainerDone(1), life="next")
    grant = asks(script, "b")
    assert len(grant.groups) == PROBLEMS, "on other weights none of it counts"
    answers(script, grant, "b")
    assert script.state().finished and evaluated(config) == [("after", 1, 1.0)]
    script.closes()


def test_the_evaluation_before_training_is_made_once(tmp_path: Path) -> None:
    """Also where the trainers start anew at a controller that took over from the one that it was due to."""
    config = configuration(tmp_path)
    script = Script(config)
    assert script.state().evaluations == ["before-greedy-0"]
    script = script.again(trainer=False)
    script.trainer("next", Restored(None))
    assert script.state().evaluations == ["before-greedy-0"]
    script.closes()


def test_an_evaluation_that_ends_between_two_gangs_is_not_made_again(tmp_path: Path) -> None:
    """The trainers have died, the rollouts go on, then the controller dies too."""
    config = configuration(tmp_path)
    script = Script(config)
    script.publish(0, 0)
    script.hear("trainer", 0, Failure("it has failed"))
    assert not script.state().trainers
    grant = script.joins(0, life="a")
    assert grant is not None and grant.evaluation == "before-greedy-0"
    answers(script, grant, "a")
    assert evaluated(config) == [("before", 0, 1.0)]
    script = script.again(trainer=False)
    assert not script.state().evaluations
    script.trainer("next", Restored(None))
    assert not script.state().evaluations
    script.closes()


@pytest.mark.parametrize("begun", [False, True])
def test_nobody_is_left_to_make_it(tmp_path: Path, begun: bool) -> None:
    """docs/promises.md#bounded-waits: without a rollout that is at work on it the run ends, with a line;
    one that has a share is awaited."""
    config = configuration(tmp_path)
    script = trained(config)
    controller, seconds = script.controller, config.cluster.batch_timeout_seconds
    if begun:
        asks(script, "a")
    for later in (0.0, seconds + 1.0, 2 * seconds):
        if not begun and later > seconds:
            with pytest.raises(LaminarError, match="none of 0 rollouts was at work on the last evaluation"):
                controller.last_evaluation.tick(time.monotonic() + later)
        else:
            controller.last_evaluation.tick(time.monotonic() + later)
    if begun:
        script.dies(0, life="a")
        controller.last_evaluation.tick(time.monotonic() + seconds / 2)
        answers(script, asks(script, "b"), "b")
        assert evaluated(config) == [("after", 1, 1.0)]
    assert script.state().finished == begun
    script.closes()


def test_nothing_was_left_to_do(tmp_path: Path) -> None:
    """The controller dies when the trainers have gone and all is done, and of the others none outlives it:
    those that come in their place are told to leave, and not kept for ever."""
    config = configuration(tmp_path)
    config.evaluation.files = []
    script = trained(config)
    assert script.state().finished
    script = script.again(trainer=False)
    script.rollout(0, life="new")
    controller, now = script.controller, time.monotonic()
    controller.last_evaluation.tick(now)
    assert script.state().trainer_done and not script.state().finished
    controller.last_evaluation.tick(now + config.cluster.batch_timeout_seconds + 1.0)
    assert script.state().finished
    script.closes()


def test_evaluations_that_are_none_of_this_controller(tmp_path: Path) -> None:
    """It was started without: what its rollouts still say of theirs changes no trajectory of the same number
    and attempt."""
    script = Script(small_config(tmp_path, replicas=1, steps=4))
    (grant,) = script.working(1)
    group, sample = grant.groups[0], grant.groups[0].samples[0]
    response, of = trajectory(group, sample), "after-greedy-4"
    number, attempt = sample.trajectory_id, sample.attempt
    script.hear("rollout", 0, Lost(number, attempt, "its engine failed", of), Generated(response, of))
    assert script.owner(number) == (0, attempt)
    script.hear("rollout", 0, Generated(response), Scored(number, attempt, 0.5, {}, "", 1.0, of))
    assert script.scoring(0) == [number]
    script.closes()
