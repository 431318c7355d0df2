"""docs/architecture.md#outlives-its-controller: the trainers are done, and the last evaluation is made,
whoever dies before it or in the middle of it; message by message."""

from pathlib import Path

import pytest
from reports import trajectory
from script import Script
from stand import small_config

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.messages.data import PromptGroup, Sample
from laminar_hpc.messages.rollouts import Generated, Grant, Scored
from laminar_hpc.messages.training import Restored, TrainerDone
from laminar_hpc.observability import jsonl

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
    script.rollout(0, life=life)
    script.asks(0, max(script.controller.weights.steps), life=life)
    grant = script.granted(0, life=life)
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
    assert script.controller.state.trainer_done and not script.controller.state.finished
    script.relay_holds(0, 1)
    grant = asks(script, "a")
    assert len(grant.groups) == PROBLEMS
    answers(script, grant, "a", count=3)
    script.closes()

    script = Script(config, trainer=False)
    script.relay_holds(0, 1)
    grant = asks(script, "b")
    assert len(grant.groups) == 1
    answers(script, grant, "b")
    assert script.controller.state.finished and evaluated(config) == [("after", 1, 1.0)]
    script.closes()


@pytest.mark.parametrize("scored", [0, 3])
def test_all_die_before_the_last_evaluation_and_in_it(tmp_path: Path, scored: int) -> None:
    """The trainers start again only to publish, and say again that they are done."""
    config = configuration(tmp_path)
    script = trained(config)
    answers(script, asks(script, "a"), "a", count=scored)
    script.closes()

    script = Script(config, trainer=False)
    script.trainer("next", Restored(1))
    assert not script.controller.state.trainer_done
    script.publish(1, 0, life="next")
    script.hear("trainer", 0, TrainerDone(1), life="next")
    grant = asks(script, "b")
    assert len(grant.groups) == PROBLEMS, "on other weights none of it counts"
    answers(script, grant, "b")
    assert script.controller.state.finished and evaluated(config) == [("after", 1, 1.0)]
    script.closes()
