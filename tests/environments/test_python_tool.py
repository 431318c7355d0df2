"""The shipped tool `python`: programs that a model has written, in the sandbox."""

import pytest

from laminar_hpc.config.schema import EnvironmentConfig
from laminar_hpc.environments import python_tool
from laminar_hpc.environments.turns.pool import EnvironmentPool
from laminar_hpc.environments.turns.tools import PythonTool, is_error


async def test_what_a_program_prints_is_what_the_model_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output; of one that fails what it had printed and why, of one that takes too long that, of one that
    prints without end the beginning and the end; nothing is kept between calls."""
    monkeypatch.setattr(python_tool, "TIMEOUT_SECONDS", 60.0)
    with python_tool._sandbox:
        assert await python_tool.python("import sympy\nx = 6\nprint(sympy.factorial(x))") == "720\n"
        assert await python_tool.python("y = 1") == "it printed nothing"
        with pytest.raises(python_tool.ProgramFailed, match=r"(?s)^begun\n.*NameError: name 'x'"):
            await python_tool.python("print('begun')\nprint(x)")
        long = await python_tool.python("print('a' * 10**6 + 'z')")
        assert long[0] == "a" and long.rstrip()[-1] == "z" and len(long) < 2 * python_tool.OUTPUT_BYTES
        monkeypatch.setattr(python_tool, "TIMEOUT_SECONDS", 0.5)
        with pytest.raises(python_tool.ProgramFailed, match="took longer than"):
            await python_tool.python("while True: pass")


async def test_it_is_a_tool_of_a_run() -> None:
    """In an environment worker, as a rollout has it: the sandbox starts there, and ends with it."""
    pool = EnvironmentPool(
        EnvironmentConfig(tools=["laminar_hpc.environments.python_tool.python"], timeout_seconds=120.0)
    )
    await pool.start()
    try:
        session = await pool.open({})
        assert await session.call("python", {"code": "print(6 * 7)"}) == "42\n"
        assert is_error(await session.call("python", {"code": "1 / 0"}))
        assert is_error(await session.call("python", {"program": "print(1)"}))
        session.close()
    finally:
        await pool.close()


def test_the_model_is_told_of_one_argument() -> None:
    """Its schema: the name that models know from elsewhere, and the program as a text."""
    schema = PythonTool(python_tool.python, "python", "environment.tools").schema["function"]
    assert schema["name"] == "python" and list(schema["parameters"]["properties"]) == ["code"]
    assert "whole program" in schema["parameters"]["properties"]["code"]["description"]
