"""docs/environments.md#turns-and-weights on an emulated engine: how its turns end, and what its prefix cache
has of a trajectory."""

from pathlib import Path

import numpy as np

from helpers.emulated.turning import CALL, TURN, several_turns
from laminar_hpc.data.tokens import TextDecoder
from laminar_hpc.engine.interface import sampling_parameters
from laminar_hpc.simulator.emulated.engine import EmulatedEngine


async def test_a_later_turn_finds_what_its_engine_has_generated(tmp_path: Path) -> None:
    """Its prompt and its turn, and no more; nothing of another trajectory's, or with other weights."""
    config = several_turns(tmp_path, "")
    engine, room = EmulatedEngine(config, 0, tmp_path), config.sampling.max_response_tokens
    prompt, given = np.arange(20, dtype=np.int32), np.arange(7, dtype=np.int32)

    async def cached(number: int, tokens: np.ndarray) -> tuple[int, np.ndarray]:
        sampling = sampling_parameters(config.sampling, 1.0, room - max(0, len(tokens) - len(prompt)), [])
        answer = await engine.generate(tokens, sampling, f"run-{number}-0-0", "0")
        return answer.cached_tokens, np.concatenate((tokens, answer.tokens))

    await engine.start(tmp_path, 0, 0)
    try:
        nothing, said = await cached(0, prompt)
        grown = np.concatenate((said, given))
        assert nothing == 0 == (await cached(1, grown))[0]
        assert (await cached(0, grown))[0] == len(said)
        await engine.start(tmp_path, 1, 0)
        assert (await cached(0, grown))[0] == 0
    finally:
        await engine.stop()


async def test_a_turn_ends_as_the_template_ends_it(tmp_path: Path) -> None:
    """Promise: whole runs of several turns find each call by its text, up to the token that ends a turn."""
    config = several_turns(tmp_path, "")
    engine = EmulatedEngine(config, 0, tmp_path)
    sampling = sampling_parameters(config.sampling, 1.0, config.sampling.max_response_tokens, [])
    await engine.start(tmp_path, 0, 0)
    try:
        turn = await engine.generate(np.arange(20, dtype=np.int32), sampling, "run-0-0-0", "0")
    finally:
        await engine.stop()
    said = TextDecoder(Path(config.model.path)).text(turn.tokens.tolist(), specials=True)
    assert len(turn.tokens) == TURN and said.endswith(CALL + "<|end|>")
