"""docs/determinism.md: with model.deterministic a run is a function of its configuration, and an asynchronous
one of its configuration and the recorded order."""

import asyncio
import hashlib
import signal
from pathlib import Path

import pytest
from safetensors import safe_open

from helpers.runs import Run, metrics, summary
from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.data.tokens import stop_token_ids
from laminar_hpc.engine.interface import Generation, sampling_parameters
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.line.messages.data import PromptGroup
from laminar_hpc.line.messages.training import BatchGroup
from laminar_hpc.rollout.in_flight import TrajectoryInFlight
from laminar_hpc.store.checkpoints import checkpoint_path
from laminar_hpc.store.payload.reader import read
from laminar_hpc.store.payload.whole import prompt_array
from laminar_hpc.store.store import Store

STEPS = 10
LONGEST = 48  # tokens of a response, as helpers.runs has it
WORDS = ["model.deterministic=true", "evaluation.files=[]", "algorithm.prompts_per_step=8"]
WORDS += ["checkpoint.every=1", f"checkpoint.keep={STEPS}"]


def weights(run_dir: Path, step: int) -> str:
    """A hash of the tensors in the checkpoint's hf/."""
    digest = hashlib.sha256()
    for file in sorted((checkpoint_path(run_dir, step) / "hf").glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                digest.update(name.encode() + tensors.get_tensor(name).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_and_one_that_was_stopped_and_resumed(tmp_path: Path) -> None:
    """pipeline=sync: after each of ten steps the same weights, bit for bit, though the second run has two
    replicas, other batches in its engines, responses in pieces, and is stopped in the middle and resumed. The
    trainer's log-probs are the engines' to the last bit."""
    words = [*WORDS, f"steps={STEPS}", "pipeline=sync"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run = Run(whole, *words)
    assert run.finish(seconds=1200) == 0, run.lines
    other = [*words, "rollout.replicas=2", "rollout.max_concurrent=10", "rollout.increment_tokens=4"]
    run = Run(parts, *other)
    run.read_until(f"step  5/{STEPS}", seconds=900)
    run.stop(signal.SIGTERM)
    assert run.finish(seconds=600) == 0, run.lines
    stopped_at = metrics(parts, "end")[-1]["step"]
    assert 5 <= stopped_at < STEPS
    run = Run(parts, *other, "resume=auto")
    run.read_until(f"going on from the checkpoint of step {stopped_at}", seconds=600)
    assert run.finish(seconds=1200) == 0, run.lines
    hashes = [[weights(folder, step) for step in range(1, STEPS + 1)] for folder in (whole, parts)]
    assert hashes[0] == hashes[1] and len(set(hashes[0])) == STEPS
    assert summary(whole)["logprob_mismatch_max"] == 0 == summary(parts)["logprob_mismatch_max"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_an_asynchronous_run_at_its_recorded_order(tmp_path: Path) -> None:
    """pipeline=laminar: the order is what time decides, and it is recorded. A replay of it gives the weights
    of the run itself after each step; and a response that is generated again, alone, from its prompt, number
    and the weights that it had, is the recorded one, token by token, with its log-probs."""
    live, again = tmp_path / "live", tmp_path / "again"
    run = Run(live, *WORDS, "steps=5", "rollout.replicas=2")
    assert run.finish(seconds=1200) == 0, run.lines
    run = Run(again, *WORDS, "steps=5", f"source=replay:{live}")
    assert run.finish(seconds=1200) == 0, run.lines
    assert [weights(live, step) for step in range(1, 6)] == [weights(again, step) for step in range(1, 6)]

    config = load_config(["experiment=demo", *WORDS, f"run_dir={tmp_path / 'engine'}"])
    rows = Store(live, read_only=True).rows
    (*_, group) = rows.batch(rows.consumed_groups(4))
    step = group.trajectories[0].weight_step
    assert step > 0, "nothing was generated on weights that were trained"
    found = asyncio.run(generated_again(config, checkpoint_path(live, step) / "hf", group))
    responses = read(live, [(t.trajectory_id, t.place) for t in group.trajectories if t.place])
    assert len(responses) == len(found) == config.algorithm.samples_per_prompt
    for one, other in zip(found, responses, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


async def generated_again(config: RunConfig, directory: Path, group: BatchGroup) -> list[Generation]:
    """The responses of a group, one after the other, by an engine on these weights."""
    engine = SglangServer(config, 0, Path(config.run_dir))
    await engine.start(directory, 1, seed=5)
    found = []
    try:
        for record in group.trajectories:
            empty = PromptGroup(group.group_id, [], "", {}, [])
            flight = TrajectoryInFlight(record.trajectory_id, 0, empty, 1, 0, 1.0, LONGEST)
            sampling = sampling_parameters(config.sampling, 1.0, LONGEST, stop_token_ids(directory))
            sampling["sampling_seed"] = flight.sampling_seed(config.seed)
            name = f"again-{record.trajectory_id}"
            found.append(await engine.generate(prompt_array(group), sampling, name, "1"))
    finally:
        await engine.stop()
    return found
