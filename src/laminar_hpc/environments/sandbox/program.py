"""Runs a text as a Python program in a forked process that has everything imported."""

import atexit
import contextlib
import os
import socket
import sys
import threading
import traceback
import types
from typing import NoReturn

from laminar_hpc.environments.isolation.limits import set_cpu_limit
from laminar_hpc.environments.sandbox.protocol import decode_call
from laminar_hpc.environments.workers.framing import receive_frame

NAME = "main.py"  # in tracebacks


def run_next() -> None:
    """Waits for a call on descriptor 0, which then becomes its input. Returns when none comes, else never."""
    with socket.socket(fileno=os.dup(0)) as requests:
        frame = receive_frame(requests)
    if frame is None:
        return
    call = decode_call(frame)
    set_cpu_limit(call.timeout_seconds)
    given = os.memfd_create("stdin")
    with open(given, "wb", closefd=False) as file:
        file.write(call.stdin.encode())
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.close(given)
    _run(call.code)


def _run(code: str) -> NoReturn:
    """As `python main.py` would: same exit codes, tracebacks and last rites."""
    module = types.ModuleType("__main__")
    module.__file__ = NAME
    sys.modules["__main__"], sys.argv = module, [NAME]
    _remember_lines(code)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # the random module sees to itself after a fork
    status = _executed(code, module)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(status)


def _executed(code: str, module: types.ModuleType) -> int:
    try:
        exec(compile(code, NAME, "exec"), module.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        with contextlib.suppress(BaseException):
            trace = error.__traceback__
            traceback.print_exception(type(error), error, trace.tb_next if trace else None)
        return 1
    return 0


def _remember_lines(code: str) -> None:
    """Tracebacks show the program's lines, which are in no file."""
    import linecache

    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
