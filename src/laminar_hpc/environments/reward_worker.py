"""The process in which reward functions run: `python -m laminar_hpc.environments.reward_worker`, started and fed by reward_pool.RewardPool.

It imports the user's function once and answers calls on a socket: async functions as tasks on its loop, plain ones in threads. A call that
raises, takes too long or returns something else is answered with an error; the process itself ends with its parent or its socket.
Imports nothing heavy, so that it is up in a fraction of a second. Nothing is unpickled.
"""

import asyncio
import importlib
import inspect
import math
import numbers
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from laminar_hpc.cluster.processes import die_with_parent
from laminar_hpc.config.errors import LaminarError

LENGTH = struct.Struct("<I")  # bytes of the frame that follows


class Setup(msgspec.Struct, tag=True):
    """First frame to a worker."""

    function: str
    timeout_seconds: float


class Call(msgspec.Struct, tag=True):
    id: int
    prompt: str
    response: str
    row: dict


class Ready(msgspec.Struct, tag=True):
    """First frame from a worker: it has the function, or `error` says why not."""

    error: str


class Result(msgspec.Struct, tag=True):
    """What became of a call. `stuck`: its thread still runs, so the worker should be replaced. Times are seconds since the epoch."""

    id: int
    reward: float
    parts: dict[str, float]
    error: str
    t0: float
    t1: float
    stuck: bool = False


encode = msgspec.msgpack.Encoder().encode
_decode_to_worker = msgspec.msgpack.Decoder(Setup | Call).decode
decode_from_worker = msgspec.msgpack.Decoder(Ready | Result).decode


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Raises asyncio.IncompleteReadError when the other side is gone."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)


def write_frame(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    frame = encode(message)
    writer.write(LENGTH.pack(len(frame)) + frame)


# ---- the function ----------------------------------------------------------------------------------------------------------------------


def load_function(path: str) -> Callable:
    """The callable at a dotted path, searched from the current folder on too. Raises LaminarError when there is none."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise LaminarError(f"reward.function='{path}' is no dotted path: write it as module.function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), name)
    except AttributeError:
        raise LaminarError(f"reward.function='{path}': {module_name} has no '{name}'") from None
    except Exception as error:
        raise LaminarError(f"reward.function='{path}' cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(function):
        raise LaminarError(f"reward.function='{path}' is a {type(function).__name__}, not a function")
    return function


def checked(value: object) -> tuple[float, dict[str, float]]:
    """(reward, other parts) of what a reward function returned. Raises ValueError or TypeError when it is not a reward."""
    values = value if isinstance(value, dict) else {"reward": value}
    if "reward" not in values:
        raise ValueError(f"it returned a dict without 'reward': {list(values)}")
    for key, number in values.items():
        if not isinstance(key, str) or not isinstance(number, numbers.Real):
            raise TypeError(f"it returned {key!r}: {type(number).__name__} instead of a number")
        if not math.isfinite(number):
            raise ValueError(f"it returned {key}={number}")
    return float(values["reward"]), {key: float(number) for key, number in values.items() if key != "reward"}


# ---- calls -----------------------------------------------------------------------------------------------------------------------------


async def _in_thread(function: Callable, call: Call) -> object:
    """Runs a plain function in a daemon thread of its own, so that one that never ends holds nobody back."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future = loop.create_future()

    def deliver(value: object, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(value)

    def body() -> None:
        try:
            value, error = function(prompt=call.prompt, response=call.response, row=call.row), None
        except BaseException as raised:  # sys.exit() in a reward function is its failure, not ours
            value, error = None, RuntimeError(f"{type(raised).__name__}: {raised}") if not isinstance(raised, Exception) else raised
        loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=body, daemon=True).start()
    return await done


async def _answer(function: Callable, is_async: bool, call: Call, timeout: float) -> Result:
    t0 = time.time()

    async def body() -> tuple[float, dict[str, float]]:
        try:
            if is_async:
                return checked(await function(prompt=call.prompt, response=call.response, row=call.row))
            return checked(await _in_thread(function, call))
        except (SystemExit, KeyboardInterrupt) as raised:
            raise RuntimeError(f"{type(raised).__name__}: {raised}") from None

    task = asyncio.create_task(body())
    await asyncio.wait((task,), timeout=timeout)
    if not task.done():
        task.cancel()  # not awaited: the function may refuse to be cancelled
        return Result(call.id, 0.0, {}, f"no result within {timeout:g} s", t0, time.time(), stuck=not is_async)
    error = task.exception()
    if error is not None:
        return Result(call.id, 0.0, {}, f"{type(error).__name__}: {error}", t0, time.time())
    reward, parts = task.result()
    return Result(call.id, reward, parts, "", t0, time.time())


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    setup = _decode_to_worker(await read_frame(reader))
    try:
        function = load_function(setup.function)
    except LaminarError as error:
        write_frame(writer, Ready(str(error)))
        await writer.drain()
        return
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    write_frame(writer, Ready(""))

    async def one(call: Call) -> None:
        write_frame(writer, await _answer(function, is_async, call, setup.timeout_seconds))

    tasks: set[asyncio.Task] = set()  # the loop itself holds tasks weakly
    while True:
        try:
            call = _decode_to_worker(await read_frame(reader))
        except asyncio.IncompleteReadError:
            return
        task = asyncio.create_task(one(call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def main() -> None:
    parent = int(sys.argv[2])
    die_with_parent()
    if os.getppid() != parent:
        return  # it died before the line above
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)  # threads of stuck functions are not waited for


if __name__ == "__main__":
    main()
