"""model.deterministic in a real engine on the CPU: what a request gets follows from weights, prompt and seed,
whatever else is in the batch and however it came about (docs/determinism.md)."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from helpers.engines.pair import EOS, engine_config, make_model
from helpers.engines.prompts import PROMPTS
from helpers.processes import LoopThread
from laminar_hpc.engine.interface import Generation, sampling_parameters
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.line.messages.data import PromptGroup
from laminar_hpc.rollout.in_flight import TrajectoryInFlight

LENGTH = 40


class One:
    """An engine, and requests to it by the seeds of trajectories."""

    def __init__(self, folder) -> None:
        model = make_model(folder / "model", 0)
        self.config = engine_config(model)
        self.config.model.deterministic = True
        self.loop = LoopThread()
        self.engine = SglangServer(self.config, 0, folder)
        self.loop.run(self.engine.start(model, 0, seed=3), seconds=250)
        self._calls = 0

    async def draw(
        self, number: int, known: list[int], namespace: str, temperature: float = 1.0
    ) -> Generation:
        """What trajectory `number` gets after its prompt and the tokens that are `known`."""
        trajectory = TrajectoryInFlight(number, 0, PromptGroup(0, [], "", {}, []), 0, 0, 1.0, LENGTH)
        parameters = sampling_parameters(self.config.sampling, temperature, LENGTH - len(known), [EOS])
        parameters["sampling_seed"] = trajectory.sampling_seed(self.config.seed)
        self._calls += 1
        prompt = [*PROMPTS[number], *known]
        return await self.engine.generate(prompt, parameters, f"call{self._calls}", namespace)

    def all(self, numbers: range, namespace: str, **more) -> list[Generation]:
        """Of several trajectories at once."""

        async def run() -> list[Generation]:
            return await asyncio.gather(*(self.draw(i, [], namespace, **more) for i in numbers))

        return self.loop.run(run(), seconds=250)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Iterator[One]:
    one = One(tmp_path_factory.mktemp("one"))
    yield one
    one.loop.run(one.engine.stop())
    one.loop.close()


def same(a: Generation, b: Generation, start: int = 0) -> None:
    """`b` is what `a` is from token `start` on, bit for bit."""
    assert a.tokens[start:].tolist() == b.tokens.tolist()
    assert np.asarray(a.logprobs)[start:].tobytes() == np.asarray(b.logprobs).tobytes()


def test_the_batch_changes_nothing(one):
    """Alone, among others, with its prompt in the prefix cache or not, beside a greedy request: one response.
    Another trajectory draws others from the same prompt."""
    together = one.all(range(len(PROMPTS)), "a")
    assert max(len(each.tokens) for each in together) > 10
    for number in (0, 5, 11):
        same(together[number], one.loop.run(one.draw(number, [], f"alone{number}")))
        same(together[number], one.loop.run(one.draw(number, [], "a")))

    async def beside_greedy() -> Generation:
        calls = one.draw(5, [], "b"), one.draw(7, [], "b", temperature=0.0)
        return (await asyncio.gather(*calls))[0]

    same(together[5], one.loop.run(beside_greedy()))


def test_what_goes_on_elsewhere_is_drawn_as_it_would_have_been(one):
    """A response that is cut after some tokens, and continued from prompt and tokens with the trajectory's
    seed, as a replica does after a move, a rescue or an abort: the same rest, with a KV cache or without."""
    for number, whole in zip(range(3, 9), one.all(range(3, 9), "c"), strict=True):
        for count in (1, len(whole.tokens) // 2, len(whole.tokens) - 1):
            known = whole.tokens[:count].tolist()
            same(whole, one.loop.run(one.draw(number, known, f"other{number}-{count}")), count)
        same(whole, one.loop.run(one.draw(number, known, "c")), count)


def test_a_prefill_gives_the_log_probs_of_decoding(one):
    """The engine's log-probs of a response that it is given are those it drew it with, to the last bit."""
    for number, drawn in enumerate(one.all(range(4), "d")):
        whole = [*PROMPTS[number], *drawn.tokens.tolist()]
        (scores,) = one.loop.run(one.engine.score([whole], "e"))
        found = np.array(scores[-len(drawn.tokens) :], "<f4")
        assert found.tobytes() == np.asarray(drawn.logprobs, "<f4").tobytes()
