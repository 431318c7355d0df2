"""The reward pool: whatever a reward function does, every call gets a score in bounded time and nothing else
stops."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.processes import found, living
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RewardConfig
from laminar_hpc.environments.reward_pool import RewardPool, Score
from laminar_hpc.environments.workers.fork_server import MAX_OUTPUT, ForkServer
from laminar_hpc.environments.workers.protocol import WorkerSetup

FUNCTIONS = """
import asyncio, json, os, re, sys, time

def plain(*, prompt, response, row):
    what = row.get("do", "")
    if what == "raise": raise KeyError("answer")
    if what == "exit": sys.exit(3)
    if what == "die": os._exit(3)
    if what == "segfault": os.kill(os.getpid(), 11)
    if what == "hang": time.sleep(1000)
    if what == "busy":
        while True: pass
    if what == "hold the GIL": re.match(r"(a+)+$", "a" * 60 + "b")
    if what == "print": print("x" * 50_000_000)
    if what == "sleep": time.sleep(row["seconds"])
    if what == "return": return row["value"]
    if what == "nan": return float("nan")
    if what == "pid": return float(os.getpid())
    if what == "look": return look(row["name"], row["file"])
    if what == "leave children":
        for _ in range(10):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.setsid()
                    open(f"{row['folder']}/{os.getpid()}", "w").close()
                    time.sleep(1000)
                os._exit(0)
        while len(os.listdir(row["folder"])) < 10: time.sleep(0.01)
        if row["then"] == "hang": time.sleep(1000)
        if row["then"] == "die": os._exit(3)
    if what == "die once":
        open(row["file"], "a").write("x")
        if os.path.getsize(row["file"]) == 1: os._exit(3)
    return float(response)

def look(name, file):
    held = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
    return float(name in os.environ or file in held)

async def patient(*, prompt, response, row):
    await asyncio.sleep(0.2)
    return {"reward": float(response), "accuracy": 1, "length": len(prompt)}

async def unkind(*, prompt, response, row):
    if row.get("do") == "hang":
        while True:
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
    if row.get("do") == "block": time.sleep(1000)
    if row.get("do") == "busy":
        while True: pass
    return float(response)

class Callable:
    async def __call__(self, *, prompt, response, row): return float(response)

as_object = Callable()
number = 3
"""
THREADS = """
import logging, threading, time
lock = threading.Lock()
def hold():
    while True:
        with lock: time.sleep(0.02)
threading.Thread(target=hold, daemon=True).start()
def score(*, prompt, response, row):
    time.sleep(0.05)
    with lock: return row["n"]
"""
TORCH = """
import torch
torch.ones(256, 256) @ torch.ones(256, 256)
def score(*, prompt, response, row):
    return (torch.ones(256, 256) @ torch.ones(256, 256)).mean() / 256 * row["n"]
"""
MODULE = "functions_for_pool_test"


@pytest.fixture(scope="module", autouse=True)
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's folder: functions are found from the current one on, without being installed."""
    folder, before = tmp_path_factory.mktemp("user"), os.getcwd()
    (folder / f"{MODULE}.py").write_text(FUNCTIONS)
    (folder / "broken_for_pool_test.py").write_text("import no_such_module_anywhere\n")
    (folder / "threads_for_pool_test.py").write_text(THREADS)
    (folder / "torch_for_pool_test.py").write_text(TORCH)
    os.chdir(folder)
    yield folder
    os.chdir(before)


async def scores(
    function: str, rows: list[dict], timeout: float = 5.0, workers: int = 1, slots: int = 64
) -> list[Score]:
    """Scores of responses "0", "1", ... with these rows, all asked for at once."""
    config = RewardConfig(
        function=f"{MODULE}.{function}",
        workers=workers,
        slots=slots,
        timeout_seconds=timeout,
        score_on_failure=-7.0,
    )
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
    """64 rewards that wait 0.2 s each take little more than 0.2 s: they are awaited together, with their
    parts."""
    t0 = time.monotonic()
    results = await scores("patient", [{}] * 64)
    assert time.monotonic() - t0 < 1.5 + 1.5  # the latter for the start of the processes on a busy machine
    assert results[5] == Score(5.0, {"accuracy": 1.0, "length": 8.0}, "", results[5].t0, results[5].t1)
    assert all(0.19 < s.t1 - s.t0 < 1.5 for s in results)
    assert (await scores("as_object", [{}]))[0].reward == 0.0


@pytest.mark.parametrize("function", ["plain", "patient"])
async def test_a_rollout_that_was_stopped_reads_its_rewards(function):
    """Calls whose workers have answered while this process stood still, for longer than their limit, have
    their rewards."""
    rows = [{"do": "sleep", "seconds": 2.0}] * 4 if function == "plain" else [{}] * 4
    pool = RewardPool(RewardConfig(function=f"{MODULE}.{function}", workers=4, timeout_seconds=3.0))
    await pool.start()
    try:
        asyncio.get_running_loop().call_later(0.1, time.sleep, 4.0)
        found = await asyncio.gather(*(pool.score("a prompt", str(i), row) for i, row in enumerate(rows)))
    finally:
        await pool.close()
    assert [score.error for score in found] == [""] * 4 and [s.reward for s in found] == [0.0, 1.0, 2.0, 3.0]


async def test_slots_bound_the_calls_in_flight():
    """No more calls than slots run at once, and results keep their order."""
    t0 = time.monotonic()
    results = await scores("patient", [{}] * 6, slots=2)
    assert time.monotonic() - t0 > 3 * 0.19 and [s.reward for s in results] == list(range(6))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"do": "raise"}, "KeyError: 'answer'"),
        ({"do": "exit"}, "SystemExit: 3"),
        ({"do": "nan"}, "it returned reward=nan"),
        ({"do": "return", "value": "good"}, "it returned 'reward': str instead of a number"),
        ({"do": "return", "value": None}, "it returned 'reward': NoneType instead of a number"),
        ({"do": "return", "value": {"accuracy": 1.0}}, "it returned a dict without 'reward'"),
        ({"do": "return", "value": {"reward": 1.0, "accuracy": "yes"}}, "it returned 'accuracy': str"),
        ({"do": "return", "value": 1e300}, "it returned reward=1e+300, beyond ±1e+06"),
        ({"do": "die"}, "its process died, twice"),
        ({"do": "segfault"}, "its process died, twice"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
async def test_a_bad_call_scores_on_failure_and_harms_no_other(row, says):
    """The failure has its own score and a reason; calls beside it, before and after, in the same worker, get
    theirs."""
    results = await scores("plain", [{}, {}, row, {}, {"do": "sleep", "seconds": 0.3}])
    assert [s.reward for s in results] == [0.0, 1.0, -7.0, 3.0, 4.0]
    assert says in results[2].error and results[2].parts == {}
    assert [s.error for i, s in enumerate(results) if i != 2] == [""] * 4


@pytest.mark.parametrize(
    ("function", "row"), [("plain", {"do": "hang"}), ("unkind", {"do": "hang"}), ("unkind", {"do": "block"})]
)
async def test_a_call_that_hangs_is_given_up_in_time(function, row):
    """Plain (its thread cannot be ended: the process is replaced), async that refuses to be cancelled, async
    that blocks the whole loop."""
    t0 = time.monotonic()
    results = await scores(function, [{}, row, {}, {}], timeout=0.5)
    assert time.monotonic() - t0 < 6.0
    assert [s.reward for s in results] == [0.0, -7.0, 2.0, 3.0]
    assert "0.5 s" in results[1].error


@pytest.mark.parametrize(
    ("function", "do", "most"),
    [
        ("plain", "busy", 1.0),
        ("plain", "hold the GIL", 1.0),
        ("plain", "hang", 1.0),
        ("unkind", "busy", 2.5),
        ("unkind", "block", 2.5),
    ],
)
async def test_calls_that_never_end_cost_their_neighbours_nothing(function, do, most):
    """32 samples, 4 of which hang, compute for ever or hold the interpreter: all is over about when the time
    limit is, and nobody else is charged. Async calls share a loop, which is given up after a second of
    silence; its calls are done again, each alone."""
    rows, began, ended = [{"do": do} if i % 8 == 0 else {} for i in range(32)], time.monotonic(), {}
    pool = RewardPool(
        RewardConfig(function=f"{MODULE}.{function}", timeout_seconds=1.5, score_on_failure=-7.0)
    )
    await pool.start()

    async def one(i: int) -> Score:
        found = await pool.score("", str(i), rows[i])
        ended[i] = time.monotonic() - began
        return found

    try:
        began = time.monotonic()
        results = await asyncio.gather(*(one(i) for i in range(32)))
    finally:
        await pool.close()
    assert [s.reward for s in results] == [-7.0 if i % 8 == 0 else float(i) for i in range(32)]
    assert {s.error for s in results} == {"", "no result within 1.5 s"}
    busy_machine = 1.5
    assert max(ended.values()) < 1.5 + most + busy_machine
    assert max(seconds for i, seconds in ended.items() if i % 8) < most + busy_machine


@pytest.mark.parametrize("then", ["hang", "die", "return"])
async def test_all_that_a_call_has_started_ends(then, tmp_path):
    """Sessions of their own and double forks: with the call that hangs or dies, and with the pool."""
    pool = RewardPool(RewardConfig(function=f"{MODULE}.plain", timeout_seconds=3.0))
    await pool.start()
    try:
        await pool.score("", "1", {"do": "leave children", "folder": str(tmp_path), "then": then})
    finally:
        if then == "return":
            await pool.close()
    started = found(map(int, os.listdir(tmp_path)))
    _, alive = await asyncio.to_thread(psutil.wait_procs, started, 20)
    assert len(os.listdir(tmp_path)) >= 10
    assert living(alive) == []
    await pool.close()


async def test_functions_have_none_of_our_keys(tmp_path, monkeypatch):
    """Neither our keys nor what launchers say is in their environment, and no open file of the rollout is
    theirs; the rest of the environment is."""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("JUDGE_KEY", "the user's own")
    with open(tmp_path / "secret", "w") as held:
        os.set_inheritable(held.fileno(), True)
        names = ["WANDB_API_KEY", "JUDGE_KEY"]
        rows = [{"do": "look", "name": name, "file": str(tmp_path / "secret")} for name in names]
        assert [s.reward for s in await scores("plain", rows)] == [0.0, 1.0]


async def test_the_crew_grows_when_all_hang():
    """32 of 32 compute for ever: they are ended together, not one after the other (which took 32 time
    limits)."""
    t0 = time.monotonic()
    results = await scores("plain", [{"do": "busy"}] * 32, timeout=1.0)
    assert time.monotonic() - t0 < 16.0 and {s.error for s in results} == {"no result within 1 s"}


async def test_waiting_calls_overlap_and_computing_ones_do_not_multiply():
    """Plain functions that wait run side by side, up to reward.slots; quick ones that compute keep to
    reward.workers processes."""
    t0 = time.monotonic()
    pids = await scores("plain", [{"do": "sleep", "seconds": 0.5}] * 24, timeout=10.0)
    assert time.monotonic() - t0 < 6.0 and {s.error for s in pids} == {""}
    quick = await scores("plain", [{"do": "pid"}] * 200, timeout=20.0)
    assert len({s.reward for s in quick}) <= 3  # one, but for a process that the machine held up


async def test_a_process_that_hangs_is_ended():
    """The call beside it and the next one are answered; the stuck process is gone, whatever it was doing."""
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


async def test_what_functions_print_is_bounded(capfd):
    """It goes to the log of the rollout, up to a limit; a function that prints without end neither fills the
    disk nor stalls."""
    results = await scores("plain", [{"do": "print"}, {"do": "print"}, {}], timeout=20.0)
    assert [s.reward for s in results] == [0.0, 1.0, 2.0]
    printed = ""
    for _ in range(100):
        printed += capfd.readouterr().err
        if "the rest is dropped" in printed:
            break
        await asyncio.sleep(0.05)
    assert MAX_OUTPUT // 2 < len(printed) < 1.1 * MAX_OUTPUT and "the rest is dropped" in printed


@pytest.mark.parametrize(
    "module", ["threads_for_pool_test", pytest.param("torch_for_pool_test", marks=pytest.mark.slow)]
)
async def test_modules_with_threads(module):
    """A module that starts threads, or loads a library that may, is not forked into a lock that nobody holds
    any more."""
    pool = RewardPool(RewardConfig(function=f"{module}.score", timeout_seconds=20.0))
    await pool.start()
    try:
        assert [
            s.reward for s in await asyncio.gather(*(pool.score("", "", {"n": i}) for i in range(6)))
        ] == list(range(6))
    finally:
        await pool.close()


async def test_the_fork_server_is_started_again():
    """A fork server that is killed, for want of memory for instance, costs nobody a reward."""
    pool = RewardPool(RewardConfig(function=f"{MODULE}.plain", timeout_seconds=5.0))
    await pool.start()
    try:
        await asyncio.gather(*(pool.score("", str(i), {"do": "sleep", "seconds": 0.5}) for i in range(8)))
        assert len(pool._crew._idle) > 2, "the crew has grown, and all of it dies with the server"
        pool._server.process.kill()
        assert [
            s.reward for s in await asyncio.gather(*(pool.score("", str(i), {}) for i in range(8)))
        ] == list(range(8))
    finally:
        await pool.close()


async def test_a_pool_that_is_closed_answers():
    """Whoever still waits for a score when the rollout leaves is told, and nothing is started any more."""
    before = psutil.Process().children()
    for function in ("plain", "unkind"):
        pool = RewardPool(RewardConfig(function=f"{MODULE}.{function}", slots=4))
        await pool.start()
        waiting = [asyncio.create_task(pool.score("", "", {"do": "hang"})) for _ in range(8)]
        await asyncio.sleep(0.1)
        await pool.close()
        assert {s.error for s in await asyncio.wait_for(asyncio.gather(*waiting), 5)} == {
            "its process died, twice"
        }
        assert psutil.Process().children() == before


def test_whoever_waits_for_the_fork_server_is_told_of_its_end():
    """Promise (docs/promises.md#bounded-waits): also when a process that it has just forked still has
    its end of the socket. The kernel holds our end for a thread that waits there, as a duplicate does."""
    server = ForkServer(WorkerSetup([], 1.0, ""))
    server._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, server._control.dup() as waits:
        waits.settimeout(10.0)
        server._end()
        assert waits.recv(1000) == b""


async def test_calls_of_a_dead_worker_are_done_again_once(tmp_path):
    """A worker that dies by accident costs nobody a reward."""
    results = await scores(
        "plain", [{"do": "die once", "file": str(tmp_path / "deaths")}, {"do": "sleep", "seconds": 0.2}]
    )
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
        ("/home/me/rewards.py:f", "write it as module.function, where module.py is in the current folder"),
    ],
)
async def test_a_function_that_is_not_there_is_refused_at_the_start(function, says):
    """One line that names the setting, before any trajectory is generated."""
    pool = RewardPool(RewardConfig(function=function))
    with pytest.raises(LaminarError, match=r"reward\.function=") as refusal:
        await pool.start()
    assert says in str(refusal.value)


def test_workers_start_fast_and_die_with_their_parent(tmp_path):
    """No heavy import, and no orphan when the rollout worker is killed: neither fork server, nor workers, nor
    what they have started."""
    script = f"""
import asyncio, os, psutil
from laminar_hpc.config.schema import RewardConfig
from laminar_hpc.environments.reward_pool import RewardPool
async def main():
    pool = RewardPool(RewardConfig(function="{MODULE}.plain", workers=2))
    await pool.start()
    print([process.pid for process in psutil.Process(os.getpid()).children(recursive=True)], flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        processes = [psutil.Process(pid) for pid in json.loads(parent.stdout.readline())]
        assert len(processes) == 5, "the fork server, and two workers with their keepers"
        for process in processes:
            assert sum(process.cpu_times()[:2]) < 0.5 * 2 and not any(
                "torch" in m.path for m in process.memory_maps()
            )
        parent.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(processes, timeout=5)
        assert living(alive) == []
    finally:
        parent.kill()
        parent.wait()
