"""The reward pool: whatever a reward function does, every call gets a score in bounded time and nothing else stops."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RewardConfig
from laminar_hpc.environments.reward_pool import RewardPool, Score

FUNCTIONS = """
import asyncio, json, os, sys, time

def plain(*, prompt, response, row):
    what = row.get("do", "")
    if what == "raise": raise KeyError("answer")
    if what == "exit": sys.exit(3)
    if what == "die": os._exit(3)
    if what == "segfault": os.kill(os.getpid(), 11)
    if what == "hang": time.sleep(1000)
    if what == "sleep": time.sleep(row["seconds"])
    if what == "return": return row["value"]
    if what == "nan": return float("nan")
    if what == "pid": return float(os.getpid())
    if what == "die once":
        open(row["file"], "a").write("x")
        if os.path.getsize(row["file"]) == 1: os._exit(3)
    return float(response)

async def patient(*, prompt, response, row):
    await asyncio.sleep(0.2)
    return {"reward": float(response), "accuracy": 1, "length": len(prompt)}

async def unkind(*, prompt, response, row):
    if row.get("do") == "hang":
        while True:
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
    if row.get("do") == "block": time.sleep(1000)
    return float(response)

class Callable:
    async def __call__(self, *, prompt, response, row): return float(response)

as_object = Callable()
number = 3
"""
MODULE = "functions_for_pool_test"


@pytest.fixture(scope="module", autouse=True)
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's folder: functions are found from the current one on, without being installed."""
    folder, before = tmp_path_factory.mktemp("user"), os.getcwd()
    (folder / f"{MODULE}.py").write_text(FUNCTIONS)
    (folder / "broken_for_pool_test.py").write_text("import no_such_module_anywhere\n")
    os.chdir(folder)
    yield folder
    os.chdir(before)


async def scores(function: str, rows: list[dict], timeout: float = 5.0, workers: int = 1, slots: int = 64) -> list[Score]:
    """Scores of responses "0", "1", ... with these rows, all asked for at once."""
    config = RewardConfig(function=f"{MODULE}.{function}", workers=workers, slots=slots, timeout_seconds=timeout, score_on_failure=-7.0)
    pool = RewardPool(config)
    await pool.start()
    try:
        return await asyncio.gather(*(pool.score("a prompt", str(i), row) for i, row in enumerate(rows)))
    finally:
        await pool.close()


async def test_each_call_gets_its_own_answer():
    """Answers come back in any order; each goes to the call that asked."""
    rows = [{"do": "sleep", "seconds": 0.15 - 0.005 * i} for i in range(30)]
    assert [s.reward for s in await scores("plain", rows, workers=2)] == list(range(30))


async def test_async_calls_overlap():
    """64 rewards that wait 0.2 s each take little more than 0.2 s: they are awaited together, with their parts."""
    t0 = time.monotonic()
    results = await scores("patient", [{}] * 64)
    assert time.monotonic() - t0 < 1.5 + 1.0  # the second for the start of the worker on a busy machine
    assert results[5] == Score(5.0, {"accuracy": 1.0, "length": 8.0}, "", results[5].t0, results[5].t1)
    assert all(0.19 < s.t1 - s.t0 < 1.5 for s in results)
    assert (await scores("as_object", [{}]))[0].reward == 0.0


async def test_slots_bound_the_calls_in_flight():
    t0 = time.monotonic()
    results = await scores("patient", [{}] * 6, slots=2)
    assert time.monotonic() - t0 > 3 * 0.19 and [s.reward for s in results] == list(range(6))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"do": "raise"}, "KeyError: 'answer'"),
        ({"do": "exit"}, "SystemExit: 3"),
        ({"do": "nan"}, "ValueError: it returned reward=nan"),
        ({"do": "return", "value": "good"}, "TypeError: it returned 'reward': str instead of a number"),
        ({"do": "return", "value": None}, "TypeError: it returned 'reward': NoneType instead of a number"),
        ({"do": "return", "value": {"accuracy": 1.0}}, "ValueError: it returned a dict without 'reward'"),
        ({"do": "return", "value": {"reward": 1.0, "accuracy": "yes"}}, "TypeError: it returned 'accuracy': str"),
        ({"do": "die"}, "its process died or stopped answering, twice"),
        ({"do": "segfault"}, "its process died or stopped answering, twice"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
async def test_a_bad_call_scores_on_failure_and_harms_no_other(row, says):
    """The failure has its own score and a reason; calls beside it, before and after, in the same worker, get theirs."""
    results = await scores("plain", [{}, {}, row, {}, {"do": "sleep", "seconds": 0.3}])
    assert [s.reward for s in results] == [0.0, 1.0, -7.0, 3.0, 4.0]
    assert says in results[2].error and results[2].parts == {}
    assert [s.error for i, s in enumerate(results) if i != 2] == [""] * 4


@pytest.mark.parametrize(("function", "row"), [("plain", {"do": "hang"}), ("unkind", {"do": "hang"}), ("unkind", {"do": "block"})])
async def test_a_call_that_hangs_is_given_up_in_time(function, row):
    """Plain (its thread cannot be ended: the process is replaced), async that refuses to be cancelled, async that blocks the whole loop."""
    t0 = time.monotonic()
    results = await scores(function, [{}, row, {}, {}], timeout=0.5)
    assert time.monotonic() - t0 < 6.0
    assert [s.reward for s in results] == [0.0, -7.0, 2.0, 3.0]
    assert "0.5 s" in results[1].error


async def test_a_worker_with_a_stuck_thread_is_replaced():
    """Calls that are in it are answered by it, new ones go to a fresh process, and the old process ends."""
    pool = RewardPool(RewardConfig(function=f"{MODULE}.plain", timeout_seconds=0.5))
    await pool.start()
    try:
        before = (await pool.score("", "", {"do": "pid"})).reward
        stuck = await pool.score("", "", {"do": "hang"})
        after = (await pool.score("", "", {"do": "pid"})).reward
        assert stuck.error == "no result within 0.5 s" and before != after
        for _ in range(100):
            if not psutil.pid_exists(int(before)):
                break
            await asyncio.sleep(0.05)
        assert not psutil.pid_exists(int(before)) and psutil.pid_exists(int(after))
    finally:
        await pool.close()


async def test_calls_of_a_dead_worker_are_done_again_once(tmp_path):
    """A worker that dies by accident costs nobody a reward."""
    results = await scores("plain", [{"do": "die once", "file": str(tmp_path / "deaths")}, {"do": "sleep", "seconds": 0.2}])
    assert [(s.reward, s.error) for s in results] == [(0.0, ""), (1.0, "")]
    assert (tmp_path / "deaths").read_text() == "xx"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (f"{MODULE}.missing", f"{MODULE} has no 'missing'"),
        (f"{MODULE}.number", "is a int, not a function"),
        ("no_such_module_here.f", "ModuleNotFoundError"),
        ("broken_for_pool_test.f", "No module named 'no_such_module_anywhere'"),
        ("justaname", "is no dotted path"),
    ],
)
async def test_a_function_that_is_not_there_is_refused_at_the_start(function, says):
    """One line that names the setting, before any trajectory is generated."""
    pool = RewardPool(RewardConfig(function=function))
    with pytest.raises(LaminarError, match=r"reward\.function=") as refusal:
        await pool.start()
    assert says in str(refusal.value)


def test_workers_start_fast_and_die_with_their_parent(tmp_path):
    """No heavy import, and no orphan when the rollout worker is killed."""
    script = f"""
import asyncio, sys, time
from laminar_hpc.config.schema import RewardConfig
from laminar_hpc.environments.reward_pool import RewardPool
async def main():
    pool = RewardPool(RewardConfig(function="{MODULE}.plain", workers=2))
    await pool.start()
    print([worker._process.pid for worker in pool._workers], flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        workers = [psutil.Process(pid) for pid in json.loads(parent.stdout.readline())]
        for process in workers:
            assert sum(process.cpu_times()[:2]) < 0.5 * 2 and not any("torch" in m.path for m in process.memory_maps())
        parent.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=5)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        parent.kill()
        parent.wait()
