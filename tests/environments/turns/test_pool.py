"""Environments in worker processes: TRL's contract, functions as tools, and what becomes of those that raise,
hang or die."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import EnvironmentConfig
from laminar_hpc.environments.turns.pool import EnvironmentPool, environment_of
from laminar_hpc.environments.turns.session import EnvironmentFailed
from laminar_hpc.policies import deadlines

MODULE = '''
import asyncio, os, time

def double(x: int) -> dict:
    """Doubles.

    Args:
        x: what
    """
    if x == 13: raise ValueError("unlucky")
    if x == 14: os._exit(3)
    if x == 15: time.sleep(60)
    return {"twice": 2 * x, "pid": os.getpid()}

async def slowly(x: int) -> str:
    """Waits a little."""
    await asyncio.sleep(0.01)
    return f"slow {x}"

def logged(function):
    def logging(x: int) -> str:
        """Says what it was called with."""
        return f"{function(x)['twice']} logged"
    return logging

twice, alias = logged(double), double

class Counter:
    """As in TRL: no argument to make one, reset takes the row."""
    def __init__(self):
        self.n = 0

    def reset(self, **row) -> str | None:
        self.n = row["start"]
        return f"at {self.n}" if self.n else None

    def add(self, by: int) -> int:
        """Adds.

        Args:
            by: how much
        """
        if by == 13: raise ValueError("unlucky")
        if by == 14: os._exit(3)
        if by == 15: time.sleep(60)
        self.n += by
        return self.n

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    plus = add

    def get_reward(self) -> float:
        return float("nan") if self.n == 99 else self.n / 10

class Waiting:
    async def reset(self, start: int) -> None:
        self.n = start

    async def add(self, by: int) -> str:
        """Adds."""
        await asyncio.sleep(60 if by == 15 else 0.01)
        self.n += by
        return f"now {self.n}"

    async def pid(self) -> int:
        """Its process."""
        return os.getpid()

    async def get_reward(self) -> dict:
        return {"reward": self.n, "accuracy": 1.0}

class Slow:
    """The first one's reset, or its wait, does not end; which file is there says so."""
    def _first(self, what):
        try:
            os.unlink(what)
        except FileNotFoundError:
            return
        time.sleep(600)

    def reset(self, **row) -> str:
        self._first("reset")
        return str(os.getpid())

    def wait(self) -> str:
        """Waits."""
        self._first("wait")
        return str(os.getpid())

    def get_reward(self) -> float:
        return 1.0

def again() -> str:
    """Hangs once."""
    Slow()._first("again")
    return "answered"
again.idempotent = True

def once() -> str:
    """Hangs once."""
    Slow()._first("again")
    return "answered"

async def asks() -> str:
    """Hangs once."""
    if os.path.exists("again"):
        os.unlink("again")
        await asyncio.sleep(600)
    return "answered"
asks.idempotent = True

def dies() -> str:
    """Dies once."""
    if os.path.exists("again"):
        os.unlink("again")
        os._exit(3)
    return "answered"
dies.idempotent = True

class Gym:
    """As in Gymnasium."""
    size = 4

    def reset(self, **row):
        return f"at {row['start']}", {"seed": 1}

    def step(self, by: int) -> str:
        """Goes."""
        return f"went {by}"

    @classmethod
    def board(cls, scale: int) -> str:
        """Its size."""
        return f"{scale * cls.size} fields"

    @staticmethod
    def total(x: int, y: int) -> int:
        """Adds."""
        return x + y

    def get_reward(self) -> float:
        return 1.0

class Bare:
    def get_reward(self) -> float:
        return 0.0
'''


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EnvironmentPool]:
    (tmp_path / "environments_of_pool_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)

    def make(
        *tools: str, factory: str | dict = "", seconds: float = 1.0, python: str = ""
    ) -> EnvironmentPool:
        module = "environments_of_pool_test."
        several = {n: module + f for n, f in factory.items()} if isinstance(factory, dict) else {}
        config = EnvironmentConfig(several or (factory and module + factory), [module + t for t in tools])
        config.timeout_seconds, config.python = seconds, python
        return EnvironmentPool(config)

    return make


async def test_functions(pool) -> None:
    """Each call of a plain one is in a process; what it raises, and that it hung or died, the model reads."""
    tools = pool("double", "slowly")
    await tools.start()
    try:
        assert [tool["function"]["name"] for tool in tools.tools[""]] == ["double", "slowly"]
        session = await tools.open({})
        assert session.observation is None
        assert json.loads(await session.call("double", {"x": "4"}))["twice"] == 8
        assert await session.call("slowly", {"x": 1}) == "slow 1"
        said = [await session.call("double", given) for given in ({"x": 13}, {"y": 1}, {"x": 14}, {"x": 15})]
        assert [json.loads(text)["error"] for text in said] == [
            "ValueError: unlucky",
            "x: Missing required argument; y: Unexpected keyword argument",
            "the process of double ended",
            "no result within 1 s",
        ]
        session.close()
    finally:
        await tools.close()


async def test_tools_are_called_as_the_user_names_them(pool) -> None:
    """The model is told of the module's or class's own name, whatever the function calls itself: two that a
    decorator has made, an alias, a method under a second name."""
    tools, environments = pool("twice", "alias", seconds=20.0), pool(factory="Counter", seconds=20.0)
    await asyncio.gather(tools.start(), environments.start())
    try:
        assert [tool["function"]["name"] for tool in tools.tools[""]] == ["twice", "alias"]
        session = await tools.open({})
        assert await session.call("twice", {"x": 4}) == "8 logged"
        assert json.loads(await session.call("alias", {"x": 5}))["twice"] == 10
        assert json.loads(await session.call("alias", {"y": 5}))["error"].startswith("x: Missing")
        counting = await environments.open({"start": 1})
        assert await counting.call("plus", {"by": 2}) == "3" and await counting.call("add", {"by": 1}) == "4"
        session.close()
        counting.close()
    finally:
        await asyncio.gather(tools.close(), environments.close())


@pytest.mark.parametrize("factory", ["Counter", "Waiting"])
async def test_sessions(pool, factory: str) -> None:
    """Of the same class side by side, each with a state of its own; plain ones in a process each."""
    environments = pool(factory=factory, seconds=20.0)
    await environments.start()
    try:
        assert environments.rewards == [""] and len(environments.tools[""]) == (
            3 if factory == "Counter" else 2
        )
        first, second = await asyncio.gather(*(environments.open({"start": n, "q": "x"}) for n in (0, 5)))
        said = await asyncio.gather(*(session.call("add", {"by": 2}) for session in (first, second)))
        assert [text[-1] for text in said] == ["2", "7"]
        pids = [await session.call("pid", {}) for session in (first, second)]
        assert (pids[0] == pids[1]) == (factory == "Waiting")
        assert (second.observation == "at 5") == (factory == "Counter") and first.observation is None
        rewards = [(await session.reward()).reward for session in (first, second)]
        assert rewards == ([0.2, 0.7] if factory == "Counter" else [2.0, 7.0])
        first.close()
        assert json.loads(await second.call("add", {"by": "many"}))["error"].startswith("by: Input should be")
    finally:
        await environments.close()


async def test_methods_of_every_kind(pool) -> None:
    """Class methods and static ones are tools with all their arguments, as one or the other is in TRL. Of
    what Gymnasium's reset returns the observation is the model's."""
    made = pool(factory="Gym", seconds=60.0)
    await made.start()
    try:
        [board, step, total] = [tool["function"] for tool in made.tools[""]]
        assert (board["name"], list(board["parameters"]["properties"])) == ("board", ["scale"])
        assert (step["name"], list(step["parameters"]["properties"])) == ("step", ["by"])
        assert (total["name"], list(total["parameters"]["properties"])) == ("total", ["x", "y"])
        session = await made.open({"start": 3})
        assert await session.call("total", {"x": 2, "y": 3}) == "5"
        assert session.observation == "at 3"
        assert await session.call("board", {"scale": 2}) == "8 fields"
        assert await session.call("step", {"by": 2}) == "went 2"
    finally:
        await made.close()


@pytest.mark.parametrize("factory", [pytest.param("Counter", marks=pytest.mark.slow), "Waiting"])
async def test_a_rollout_that_was_stopped_reads_its_answers(pool, factory: str) -> None:
    """A reset, a call and a reward that were there while this process stood still, for longer than their
    limit, are no failures of the environment."""
    held = asyncio.get_running_loop().call_later
    made = pool(factory=factory, seconds=2.0)
    await made.start()
    try:
        held(0.05, time.sleep, 3.0)
        session = await made.open({"start": 1})
        held(0.0, time.sleep, 3.0)
        assert "3" in await session.call("add", {"by": 2})
        held(0.0, time.sleep, 3.0)
        assert (await session.reward()).reward in (0.3, 3.0)
    finally:
        await made.close()


async def test_a_row_names_its_environment(pool) -> None:
    """Of several factories each session is of its row's, plain or async, with tools of its own; two functions
    of one name are refused."""
    environments = pool(factory={"plain": "Counter", "async": "Waiting"}, seconds=20.0)
    await environments.start()
    try:
        assert sorted(environments.rewards) == ["async", "plain"] and len(environments.tools) == 2
        rows = [{"environment": name, "start": 3} for name in ("plain", "async", "plain", "async")]
        sessions = await asyncio.gather(*map(environments.open, rows))
        assert [session.observation for session in sessions] == ["at 3", None, "at 3", None]
        said = [await session.call("add", {"by": 1}) for session in sessions]
        assert said == ["4", "now 4", "4", "now 4"]
        pids = [await session.call("pid", {}) for session in sessions]
        assert pids[1] == pids[3] and len(set(pids)) == 3
        assert [(await session.reward()).reward for session in sessions] == [0.4, 4.0, 0.4, 4.0]
        for session in sessions:
            session.close()
    finally:
        await environments.close()
    with pytest.raises(LaminarError, match="several are called double; rename"):
        pool("double", "double")


@pytest.mark.parametrize(
    "row, said", [({"prompt": "p"}, "is not there"), ({"environment": "sohp"}, "is 'sohp'")], ids=["no", "x"]
)
def test_a_row_without_an_environment_is_named(row: dict, said: str) -> None:
    """One line, with the row's place and the names that there are."""
    config = EnvironmentConfig({"math": "a.Math", "shop": "b.Shop"})
    with pytest.raises(LaminarError) as error:
        environment_of(config, row, "rows.jsonl:7")
    assert str(error.value) == (
        f"rows.jsonl:7: its field 'environment' {said}, and environment.factory has math, shop; name one of "
        "them in the row"
    )
    assert environment_of(EnvironmentConfig("a.Math"), row) == ""


async def test_failures_are_told_apart(pool) -> None:
    """What a method raises the model reads; a process that dies, a call that hangs, a reset that raises and a
    reward that is none are nobody's answer, and others go on."""
    environments = pool(factory="Counter")
    await environments.start()
    try:
        good, dies, hangs, wrong = [await environments.open({"start": 99}) for _ in range(4)]
        assert json.loads(await good.call("add", {"by": 13})) == {"error": "ValueError: unlucky"}
        with pytest.raises(EnvironmentFailed, match="its process ended in add"):
            await dies.call("add", {"by": 14})
        with pytest.raises(EnvironmentFailed, match="add did not return in time"):
            await hangs.call("add", {"by": 15})
        with pytest.raises(EnvironmentFailed, match="get_reward: it returned reward=nan"):
            await wrong.reward()
        with pytest.raises(EnvironmentFailed, match="reset: KeyError: 'start'"):
            await environments.open({})
        assert await good.call("add", {"by": 1}) == "100" and (await good.reward()).reward == 10.0
        for session in (good, dies, hangs, wrong):
            session.close()
    finally:
        await environments.close()


async def test_an_async_call_that_hangs_leaves_the_others(pool) -> None:
    """They share a process."""
    environments = pool(factory="Waiting")
    await environments.start()
    try:
        hangs, good = [await environments.open({"start": 1}) for _ in range(2)]
        waiting = asyncio.create_task(hangs.call("add", {"by": 15}))
        assert await good.call("add", {"by": 1}) == "now 2"
        with pytest.raises(EnvironmentFailed, match="add: no result within 1 s"):
            await waiting
        assert await good.call("add", {"by": 1}) == "now 3"
    finally:
        await environments.close()


@pytest.mark.parametrize("name, words", [("Bare", "has no reset"), ("Nobody", "has no 'Nobody'")])
async def test_what_is_no_environment(pool, name: str, words: str) -> None:
    """One line before anything starts."""
    with pytest.raises(LaminarError, match=words):
        await pool(factory=name).start()


def learned(environments: EnvironmentPool, name: str, method: str) -> None:
    """As if a hundred calls had been quick."""
    for _ in range(deadlines.FEWEST):
        environments.deadline(name, method).took(0.001)


async def test_a_late_reset_and_a_hung_call(pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset that does not end is begun in a second environment, whose session is the one that is given, and
    the first is ended. A call that hangs is found long before its limit; one that is patient is not cut
    off."""
    monkeypatch.setattr(deadlines, "LATE_SECONDS", 0.2)
    monkeypatch.setattr(deadlines, "HUNG_SECONDS", 100.0)
    environments = pool(factory="Slow", seconds=500.0)
    await environments.start()
    try:
        learned(environments, "", "reset")
        Path("reset").touch()
        session = await environments.open({})
        assert not Path("reset").exists() and session.observation == await session.call("wait", {})
        learned(environments, "", "wait")
        monkeypatch.setattr(deadlines, "HUNG_SECONDS", 0.5)
        Path("wait").touch()
        with pytest.raises(EnvironmentFailed, match="wait did not return in time"):
            await session.call("wait", {})
        session.close()
        Path("wait").touch()
        patient = await environments.open({}, patient=True)
        waiting = asyncio.create_task(patient.call("wait", {}))
        done, _ = await asyncio.wait({waiting}, timeout=1.5)
        assert not done
        waiting.cancel()
        patient.close()
    finally:
        await environments.close()


@pytest.mark.parametrize("name", ["again", "asks", "dies"])
async def test_an_idempotent_tool_is_called_again(pool, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One that hangs, or whose process dies: the second answer is the call's."""
    monkeypatch.setattr(deadlines, "LATE_SECONDS", 0.2)
    tools = pool(name, seconds=500.0)
    await tools.start()
    try:
        learned(tools, name, "")
        Path("again").touch()
        session = await tools.open({})
        assert await session.call(name, {}) == "answered" and not Path("again").exists()
        session.close()
    finally:
        await tools.close()


async def test_another_tool_is_called_once(pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late it is: the model is told at its time limit."""
    monkeypatch.setattr(deadlines, "LATE_SECONDS", 0.05)
    tools = pool("once", seconds=2.0)
    await tools.start()
    try:
        learned(tools, "once", "")
        Path("again").touch()
        session = await tools.open({})
        assert json.loads(await session.call("once", {})) == {"error": "no result within 2 s"}
        session.close()
    finally:
        await tools.close()
