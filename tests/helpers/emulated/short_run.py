"""The records of a short run: real controller, tracker and store, scripted workers; every state that a
trajectory can have is in it."""

import json
from collections.abc import Iterator
from pathlib import Path

from helpers.control.script import Script
from helpers.emulated.stand import small_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.rollouts import Grant, Lost
from laminar_hpc.store.checkpoints import checkpoint_path

TOKENS = 12
STEPS = 3


def configuration(folder: Path) -> RunConfig:
    """Groups of two of which one is right, some of which get a second pair."""
    config = small_config(folder, replicas=2, steps=8, prompts=4)
    config.algorithm.first_samples = 2
    config.algorithm.more_samples = 2
    config.algorithm.zero_variance = "filter"
    return config


def record(folder: Path, config: RunConfig | None = None) -> Path:
    """The run directory: three steps trained on two weight ids and more, the third after a restore to step 2;
    one group waiting, one being scored, one in progress, one given up; one attempt that was lost."""
    script = Script(config or configuration(folder))
    config = script.controller.config
    for step in range(2):
        fill(script, step, config.algorithm.prompts_per_step)
        script.trains(step)
    _checkpoint(config, 2, script.controller.store.store_id)
    fill(script, 2, config.algorithm.prompts_per_step)
    script.trains(2)  # abandoned: the run dies before the checkpoint of step 3
    script.closes()

    script = Script(config, restored_step=2)
    _serve(script, 2)
    script.trains(2)
    fill(script, 3, 1)
    _left_over(script)
    script.ends_clean()
    return Path(config.run_dir)


def _serve(script: Script, step: int) -> None:
    """New weights; a replica that has no work pulls them and asks."""
    weight_id = script.publish(step, 0)
    for index in (0, 1):
        if script.controller.members.at("rollout", index) is None:
            script.rollout(index)
    for index in (0, 1):
        if not _has_work(script, index):
            script.asks(index, weight_id, script.newest_batch(index))


def _has_work(script: Script, index: int) -> bool:
    return any(isinstance(m, Grant) for m in script.hub.left.get(f"rollout:{index}:", []))


def _grants(script: Script) -> Iterator[tuple[int, Grant]]:
    """One after the other, as replicas that end a local batch ask for the next."""
    for _ in range(20):
        for index in (0, 1):
            if not _has_work(script, index):
                newest = script.newest
                script.asks(index, newest, script.newest_batch(index))
            if (grant := script.granted(index)) is not None:
                yield index, grant
    raise AssertionError(f"only {script.state().ready_groups} groups became ready")


def fill(script: Script, step: int, groups: int) -> None:
    """On weights of `step` local batches are generated and scored until so many groups are ready."""
    _serve(script, step)
    for index, grant in _grants(script):
        script.ends(index, grant, TOKENS, right=lambda i: i % 2 == 1 and i % 8 != 1)
        if script.state().ready_groups >= groups:
            return


def _left_over(script: Script) -> None:
    """A group is given up, as all of its responses are right; one waits for its scores; of one an attempt is
    lost."""
    grants = _grants(script)
    index, grant = next(grants)
    script.ends(index, grant, TOKENS, right=lambda _: True)
    index, grant = next(grants)
    script.ends(index, grant, TOKENS, scores=False)
    index, grant = next(grants)
    sample = grant.groups[0].samples[0]
    script.hear("rollout", index, Lost(sample.trajectory_id, sample.attempt, "the engine returned no token"))


def _checkpoint(config: RunConfig, step: int, store_id: str) -> None:
    folder = checkpoint_path(Path(config.run_dir), step)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": step, "store_id": store_id}))
