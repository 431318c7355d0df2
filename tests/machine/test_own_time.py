"""docs/loops.md#rollout: what another process has answered in time counts, whenever we read it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from aiohttp import web

from laminar_hpc.engine.sglang.http_client import HttpClient
from laminar_hpc.engine.sglang.plugin import protocol
from laminar_hpc.engine.sglang.port_client import PortClient
from laminar_hpc.environments.http_reward import HttpReward
from laminar_hpc.environments.sandbox import local
from laminar_hpc.environments.workers.protocol import Call, Spec
from laminar_hpc.machine.own_time import own_time, within

STOOD = 3.0  # seconds for which the loop is held; each limit is shorter


def stands() -> None:
    """Soon this process's event loop stands still."""
    asyncio.get_running_loop().call_later(0.1, time.sleep, STOOD)


async def test_time_in_which_the_loop_stood_is_nobodys() -> None:
    """A wait that outlasts the standstill has the rest of its limit; one that nobody answers ends."""
    began, came = own_time(), asyncio.get_running_loop().create_future()
    stands()
    asyncio.get_running_loop().call_later(STOOD + 0.5, came.set_result, 1)
    async with within(2.0):
        assert await came == 1
    assert own_time() - began < 2.0
    with pytest.raises(TimeoutError):
        async with within(0.1):
            await asyncio.Event().wait()
    async with within(None):
        await asyncio.sleep(0.2)


WAITS = """
import asyncio, sys
from laminar_hpc.machine.own_time import within

async def main():
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    print("waits", flush=True)
    async with within(1.0):
        print((await reader.readline()).decode(), flush=True)

asyncio.run(main())
"""


def test_a_process_that_was_stopped_reads_its_answer() -> None:
    """It was stopped for longer than its limit, and the answer came meanwhile."""
    words = [sys.executable, "-c", WAITS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        process.stdin.write("answer\n")
        process.stdin.flush()
        time.sleep(2.0)
        process.send_signal(signal.SIGCONT)
        said = process.stdout.read()
    assert said == "answer\n\n" and process.returncode == 0


class Engine:
    """In the place of EngineProcess: it lives."""

    name, key = "engine", "key"

    def __init__(self, port: int, socket_path: str) -> None:
        self.port, self.socket_path, self.dead = port, socket_path, asyncio.Event()


def serve(found: dict, ready: threading.Event) -> None:
    """SGLang's port, in a thread with a loop of its own."""

    async def answers(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        if request.path == "/stream":
            return web.Response(text='data: {"a": 1}\n\n')
        return web.json_response({"a": 1} | ({"embedding": [0.5]} if request.path == "/" else {}))

    async def main() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answers)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.update(port=runner.addresses[0][1], loop=asyncio.get_running_loop(), end=asyncio.Event())
        ready.set()
        await found["end"].wait()
        await runner.cleanup()

    asyncio.run(main())


@pytest.fixture
def server() -> Iterator[int]:
    """Its port."""
    found, ready = dict[str, Any](), threading.Event()
    thread = threading.Thread(target=serve, args=(found, ready))
    thread.start()
    assert ready.wait(60)
    yield found["port"]
    found["loop"].call_soon_threadsafe(found["end"].set)
    thread.join(60)


async def test_a_reward_behind_a_url(server: int) -> None:
    """Which has answered while our loop stood."""
    spec = Spec("", "", "", f"http://127.0.0.1:{server}/", "sglang", "")
    reward = HttpReward(spec, 2.5)
    stands()
    assert await reward(Call(1, "", "p", "r")) == {"reward": 0.5}
    assert reward._session is not None
    await reward._session.close()


async def test_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of a program that it has run."""
    with local.Sandbox() as sandbox:
        await sandbox.run("")
        monkeypatch.setattr(local, "QUEUE_SECONDS", 0.0)
        stands()
        result = await sandbox.run("import time; time.sleep(1); print(36)", timeout_seconds=2.5)
        assert result.stdout == "36\n"


async def test_an_engines_replies(server: int) -> None:
    """Of SGLang by HTTP, whole or as events, which has answered while our loop stood."""
    client = HttpClient(Engine(server, ""))  # type: ignore[arg-type]
    client.open()
    stands()
    assert await client.post("/whole", {}, 2.0) == {"a": 1}
    stands()
    assert await client.get("/whole", 2.0) == {"a": 1}
    stands()
    assert [event async for event in client.events("/stream", {}, 2.0)] == [b'{"a": 1}\n']
    await client.close()


async def test_an_engines_plugin(tmp_path: Path) -> None:
    """Of our plugin in each rank of SGLang, which has answered while our loop stood."""
    path, context = str(tmp_path / "port"), zmq.Context()
    ranks = [context.socket(zmq.REP) for _ in range(2)]
    for rank, socket in enumerate(ranks):
        socket.bind(f"ipc://{protocol.socket_path(path, rank)}")

    def answer(socket: zmq.Socket) -> None:
        socket.recv()
        time.sleep(0.5)
        socket.send(protocol.encode(protocol.Alive(7)))

    client = PortClient(Engine(0, path), 2)  # type: ignore[arg-type]
    threads = [threading.Thread(target=answer, args=(socket,)) for socket in ranks]
    for thread in threads:
        thread.start()
    stands()
    alive = await client.call(protocol.PortPing(), protocol.Alive, 2.0)
    assert [each.pid for each in alive] == [7, 7]
    for thread in threads:
        thread.join(60)
    client.close()
    context.destroy(linger=0)
