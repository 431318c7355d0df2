"""A sandbox for Python that a model has written: `await run(code, stdin, timeout_seconds)`.

`Sandbox` runs it on this machine, as far apart from everything else as the kernel allows; `SandboxFusion` of
fusion.py, which needs aiohttp, asks a server that speaks SandboxFusion's /run_code. Both have the same `run`.
"""

import functools

from laminar_hpc.environments.sandbox.local import Sandbox, SandboxFailed
from laminar_hpc.environments.sandbox.protocol import Limits, Result

__all__ = ["Limits", "Result", "Sandbox", "SandboxFailed", "run", "run_sync"]


@functools.cache
def shared() -> Sandbox:
    """The sandbox of this process, with the defaults."""
    return Sandbox()


async def run(code: str, stdin: str = "", timeout_seconds: float = 10.0) -> Result:
    """`Sandbox.run` in the sandbox of this process."""
    return await shared().run(code, stdin, timeout_seconds)


def run_sync(code: str, stdin: str = "", timeout_seconds: float = 10.0) -> Result:
    """`Sandbox.run_sync` in the sandbox of this process."""
    return shared().run_sync(code, stdin, timeout_seconds)
