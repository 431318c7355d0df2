"""A group whose samples are parted by a move between two real engines: the one that goes on elsewhere guesses
from those that ended here (rollout/siblings.py), and is drawn as if it had neither moved nor guessed."""

import asyncio
import copy
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from helpers.engines.moving import prompt_of
from helpers.engines.pair import Pair, hf_logprobs, reference, start_pair
from helpers.engines.prompts import Ended, before_its_end
from helpers.engines.replica_side import ReplicaSide
from laminar_hpc.engine.interface import Generation, sampling_parameters
from laminar_hpc.line.messages.data import Partial, PromptGroup, Sample
from laminar_hpc.line.messages.moves import (
    Import,
    Imported,
    MoveCommit,
    MoveFailed,
    MoveOrder,
    MoveReady,
    Reserve,
    Reserved,
)
from laminar_hpc.line.messages.rollouts import Grant, Increment
from laminar_hpc.rollout.in_flight import granted
from laminar_hpc.rollout.partial_response import logprobs_of, tokens_of

LENGTH, WAIT, LOOK = 300, 120.0, 0.002
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The first engine never guesses. Draws are tied to trajectory and position."""
    pair = start_pair(tmp_path_factory.mktemp("pair"), speculation=("off", "suffix"), deterministic=True)
    yield pair
    pair.stop()


@dataclass
class Moved:
    """`told`: tokens of its siblings that went along; `steps`: of the destination's engine."""

    partial: Partial
    before: int
    told: int
    steps: int


def side(pair: Pair, number: int, folder: Path, at_once: int, increments: int) -> ReplicaSide:
    """A replica of engines that guess, whatever this one does."""
    config = copy.deepcopy(pair.config)
    config.rollout.speculation, config.rollout.max_concurrent = "suffix", at_once
    config.rollout.increment_tokens = increments
    return ReplicaSide(config, folder, lambda: pair.engines[number])


async def parted(pair: Pair, folder: Path, grant: Grant, siblings: bool) -> Moved:
    """The last sample of the grant's group, moved in mid-answer when the others have ended. Raises Ended."""
    [group] = grant.groups
    source, there = side(pair, 0, folder / "a", 1, 16), side(pair, 1, folder / "b", 8, 0)
    engine, bodies = pair.engines[1], list[bytes]()
    post = engine.http.post_for_bytes

    async def noted(*given: object) -> bytes:
        bodies.append(await post(*given))
        return bodies[-1]

    engine.http.post_for_bytes = noted
    other = PromptGroup(9, prompt_of(9), "", {}, [Sample(1, 0)])  # keeps the destination at work
    running = [source.grant(grant), there.grant(Grant(2, 0, 0, [other], 0.0, 1800))]
    moving, name = group.samples[-1].trajectory_id, f"move-{folder.name}"
    try:
        async with asyncio.timeout(WAIT):
            while not any(isinstance(w, Increment) and w.trajectory_id == moving for w in source.said):
                await asyncio.sleep(LOOK)
        if len(source.ended) != len(group.samples) - 1:
            raise Ended
        room = len(group.prompt_tokens) + LENGTH
        there.migration.arrived(Reserve(name, moving, group, 0, 0, room, True, grant.temperature, LENGTH))
        address = (await there.until_said(Reserved, WAIT, LOOK)).address
        source.migration.arrived(MoveOrder(name, moving, 0, address))
        ready = await source.until_said((MoveReady, MoveFailed), WAIT, LOOK)
        if isinstance(ready, MoveFailed) or ready.partial.count > LENGTH // 2:
            raise Ended  # too late, on a busy machine
        there.migration.arrived(Import(name, ready.partial, ready.siblings if siblings else b""))
        came = await there.until_said(Imported, WAIT, LOOK)
        assert came.prefix_tokens == len(group.prompt_tokens) + ready.partial.count - 1
        for replica in (source, there):
            replica.migration.arrived(MoveCommit(name, 1))
        async with asyncio.timeout(WAIT):
            while moving not in there.ended:
                await asyncio.sleep(LOOK)
    finally:
        engine.http.post_for_bytes = post
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.gather(*(each.abort() for each in pair.engines))
    [meta] = [m for m in (json.loads(body)["meta_info"] for body in bodies) if f"-{moving}-" in m["id"]]
    return Moved(there.ended[moving], ready.partial.count, len(ready.siblings) // 4, meta["spec_verify_ct"])


@pytest.mark.parametrize(
    ("temperature", "siblings", "prompts"),
    [(0.0, False, (29, 30, 20, 22)), (0.0, True, (32,)), (0.3, True, (33, 34, 35))],
)
def test_the_sample_that_moved_goes_on_guessing_from_its_group(
    pair, tmp_path, temperature, siblings, prompts
):
    """Promise: token by token what an engine draws that never guesses, with the model's log-probs. Of greedy
    samples, which are all alike, a step brings 6 to 7 tokens, and without siblings 3 to 4."""
    numbers = itertools.cycle(prompts)

    async def attempt(number: int) -> tuple[list[int], Moved, Generation]:
        prompt = prompt_of(next(numbers), 30)
        group = PromptGroup(1, prompt, "", {}, [Sample(100 * number + i, 0) for i in range(3)])
        grant = Grant(1, 0, 0, [group], temperature, LENGTH)
        moved = await parted(pair, tmp_path / str(number), grant, siblings)
        sampling = sampling_parameters(pair.config.sampling, temperature, LENGTH, [])
        sampling["sampling_seed"] = granted(grant)[-1].sampling_seed(pair.config.seed)
        return prompt, moved, await pair.engines[0].generate(prompt, sampling, f"whole-{prompt[:3]}", "0")

    prompt, moved, whole = pair.loop.run(before_its_end(attempt), seconds=600)
    tokens = tokens_of(moved.partial)
    assert tokens.tolist() == whole.tokens.tolist() and 0 < moved.before < len(tokens)
    torch.testing.assert_close(
        torch.tensor(logprobs_of(moved.partial)), torch.tensor(whole.logprobs), atol=1e-5, rtol=0
    )
    expected = hf_logprobs(reference(pair.models[0]), prompt, tokens, temperature or 1.0)
    torch.testing.assert_close(torch.tensor(whole.logprobs), expected, atol=1e-4, rtol=0)
    brought = (len(tokens) - moved.before) / moved.steps
    print(f"T {temperature}: {moved.before} of {len(tokens)} before, told {moved.told}, {brought:.2f} a step")
    assert moved.told >= 2 * len(tokens) * (temperature == 0)
    assert temperature > 0 or (brought > 5) == siblings
