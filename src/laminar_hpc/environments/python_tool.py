"""A Python interpreter as a tool: the model's code runs in the sandbox. `python` in environment.tools."""

from laminar_hpc.environments.sandbox import Limits, Sandbox

TIMEOUT_SECONDS = 10.0  # of a program
OUTPUT_BYTES = 4 << 10  # that the model reads of each stream; the middle of more is left out

_sandbox = Sandbox(limits=Limits(output_bytes=OUTPUT_BYTES))


class ProgramFailed(Exception):
    """A program failed; what it says is for the model."""


async def python(code: str) -> str:
    """Runs a Python program and returns what it prints. numpy and sympy can be imported.

    Args:
        code: the whole program; nothing is kept from one call to the next, so print what you want to know
    """
    result = await _sandbox.run(code, timeout_seconds=TIMEOUT_SECONDS)
    if result.timed_out:
        raise ProgramFailed(f"it took longer than {TIMEOUT_SECONDS:g} s and was ended\n{result.stdout}")
    if result.exit:
        raise ProgramFailed(f"{result.stdout}{result.stderr or f'it ended with {result.exit}'}")
    return result.stdout or "it printed nothing"
