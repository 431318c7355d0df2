"""The interpreter that runs verifiers: workers of the host that become bridge.py, asked as an agent is."""

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from laminar_hpc.config.schema import EnvironmentConfig
from laminar_hpc.environments.workers.fork_server import ForkServer, Worker
from laminar_hpc.environments.workers.interpreter import OURS, Interpreter
from laminar_hpc.environments.workers.protocol import Spec, WorkerSetup

_BRIDGE = Path(__file__).with_name("bridge.py")
_NOT_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # our packages are not the interpreter's


class VerifiersInterpreter(Interpreter):
    """Needs nothing of ours; its processes find their own packages, and its uv."""

    def check(self) -> None:
        """Raises LaminarError where it is not there."""
        assert self.program

    def command(self) -> list[str]:
        """Our fork server, whose workers become the bridge."""
        return OURS.command()

    def environment(self, ours: dict[str, str]) -> dict[str, str]:
        own = {name: value for name, value in ours.items() if name not in _NOT_OURS}
        own["PATH"] = f"{Path(self.program).parent}:{own.get('PATH', os.defpath)}"
        for proxy in ("no_proxy", "NO_PROXY"):
            own[proxy] = ",".join(filter(None, (own.get(proxy), "127.0.0.1")))
        return own


def block(config: EnvironmentConfig) -> dict:
    """What the user says, as verifiers has it: its [env] block."""
    return {"taskset": {"id": config.verifiers}} if isinstance(config.verifiers, str) else config.verifiers


def name(config: EnvironmentConfig) -> str:
    """What errors call it."""
    return f"environment.verifiers={block(config)['taskset']['id']}"


def bridge(config: EnvironmentConfig, serve: bool = True, quiet: bool = False) -> ForkServer:
    """Of workers that play episodes or, without `serve`, are there for the tasks."""
    python = VerifiersInterpreter("environment.python", config.python)
    first = {"environment": block(config), "max_turns": config.max_turns, "serve": serve}
    said = msgspec.json.encode(first).decode()
    setup = WorkerSetup([Spec("", name(config), said)], 0.0, program=[python.path, "-P", str(_BRIDGE)])
    return ForkServer(setup, quiet, python)


@contextlib.asynccontextmanager
async def loaded(config: EnvironmentConfig, quiet: bool = False) -> AsyncIterator[Worker]:
    """A worker with the environment loaded, and no more. Raises LaminarError where it cannot be used."""
    server = bridge(config, serve=False, quiet=quiet)
    try:
        await server.start()
        yield await server.fork(True)
    finally:
        await server.stop()
