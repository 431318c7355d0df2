"""What tools, environments and rewards return and raise, of any kind, is an answer: no call waits for ever,
and no process dies of it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar_hpc.config.schema import EnvironmentConfig, RewardConfig
from laminar_hpc.environments.reward_pool import RewardPool
from laminar_hpc.environments.turns.pool import EnvironmentPool
from laminar_hpc.environments.turns.session import EnvironmentFailed
from laminar_hpc.environments.workers import crews

MODULE = '''
import asyncio

class Wordless(Exception):
    def __str__(self):
        raise RuntimeError("no words")

HALF = "x" + chr(0xd800)

def of(what):
    if what == "wordless": raise Wordless
    if what == "raised": raise ValueError(HALF)
    deep = []
    for _ in range(100_000): deep = [deep]
    return {"half": HALF, "deep": deep, "none": None, "zero": "a" + chr(0)}[what]

def plain(what: str) -> object:
    """Returns it."""
    return of(what)

async def together(what: str) -> object:
    """Returns it."""
    return of(what)

async def half(n: int) -> int:
    """Halves."""
    return n // 2

async def silences() -> str:
    """Ends whatever its process would have said of it."""
    for task in asyncio.all_tasks():
        if task.get_coro().__name__ == "one":
            task.cancel()
    await asyncio.sleep(600)

class Silencing:
    async def reset(self, **row): pass
    async def wait(self) -> str:
        """As that."""
        await silences()
    async def get_reward(self): return 1.0

class Plain:
    def reset(self, **row): return HALF
    def plain(self, what: str) -> object:
        """Returns it."""
        return of(what)
    def get_reward(self): return {"reward": 1.0, self.part: 2.0}
    def name(self, part: str) -> None:
        """Of a part."""
        self.part = HALF if part == "half" else part

class Together:
    async def reset(self, **row): return HALF
    async def together(self, what: str) -> object:
        """Returns it."""
        return of(what)
    async def get_reward(self): return {"reward": 1.0, self.part: 2.0}
    async def name(self, part: str) -> None:
        """Of a part."""
        self.part = HALF if part == "half" else part

def score(*, prompt, response, row): return {"reward": 1.0, HALF: 1.0} if row["part"] else of("wordless")

async def score_together(*, prompt, response, row):
    return score(prompt=prompt, response=response, row=row)
'''
NAME = "returned_in_pool_test"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / f"{NAME}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield


def pool(*tools: str, factory: str = "", seconds: float = 30.0) -> EnvironmentPool:
    config = EnvironmentConfig(factory and f"{NAME}.{factory}", [f"{NAME}.{tool}" for tool in tools])
    config.timeout_seconds = seconds
    return EnvironmentPool(config)


async def test_of_functions() -> None:
    """Plain or async: the model reads it, as text that any tokenizer takes."""
    tools = pool("plain", "together", "half")
    await tools.start()
    try:
        session = await tools.open({})
        for name in ("plain", "together"):
            said = {
                what: await session.call(name, {"what": what})
                for what in ("half", "deep", "none", "zero", "raised", "wordless")
            }
            assert (said["half"], said["none"], said["zero"]) == ("x?", "null", "a\0")
            assert said["deep"].startswith(("[[[", '{"error": "RecursionError'))
            assert json.loads(said["raised"]) == {"error": "ValueError: x?"}
            assert json.loads(said["wordless"])["error"].startswith("Wordless: ")
        assert await session.call("half", {"n": 10**40}) == str(10**40 // 2)
        session.close()
    finally:
        await tools.close()


@pytest.mark.parametrize("factory", ["Plain", "Together"])
async def test_of_environments(factory: str) -> None:
    """The same; a reward whose parts have names that cannot be kept is an environment that failed, in one
    line."""
    environments = pool(factory=factory)
    await environments.start()
    try:
        session, method = await environments.open({}), factory.lower()
        assert session.observation == "x?"
        assert await session.call(method, {"what": "half"}) == "x?"
        assert json.loads(await session.call(method, {"what": "wordless"}))["error"].startswith("Wordless: ")
        for part, words in (("half", "surrogates not allowed"), ("n" * 300, "a name of 300 characters")):
            await session.call("name", {"part": part})
            with pytest.raises(EnvironmentFailed, match=f"get_reward: .*{words}"):
                await session.reward()
        await session.call("name", {"part": "good"})
        assert (await session.reward()).parts == {"good": 2.0}
        session.close()
    finally:
        await environments.close()


async def test_a_call_of_which_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shared process lives, and has lost it: it is given up, beyond its own limit."""
    tools, environments = pool("silences", seconds=60.0), pool(factory="Silencing", seconds=60.0)
    await asyncio.gather(tools.start(), environments.start())
    try:
        session, other = await tools.open({}), await environments.open({})
        monkeypatch.setattr(crews, "WORD_SECONDS", -59.5)
        assert json.loads(await session.call("silences", {})) == {"error": "the process of silences ended"}
        with pytest.raises(EnvironmentFailed, match="wait did not return in time"):
            await other.call("wait", {})
        session.close()
        other.close()
    finally:
        await asyncio.gather(tools.close(), environments.close())


@pytest.mark.parametrize("function", ["score", "score_together"])
async def test_of_rewards(function: str) -> None:
    """A failure with its reason, at once."""
    config = RewardConfig(function=f"{NAME}.{function}", timeout_seconds=30.0, score_on_failure=-1.0)
    rewards = RewardPool(config)
    await rewards.start()
    try:
        named, wordless = await asyncio.gather(*(rewards.score("p", "r", {"part": n}) for n in (1, 0)))
        assert (named.reward, wordless.reward) == (-1.0, -1.0)
        assert "surrogates not allowed" in named.error and wordless.error.startswith("Wordless: ")
    finally:
        await rewards.close()
