"""environment.python: environments under an interpreter with none of our packages but those that our worker
needs."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import EnvironmentConfig
from laminar_hpc.environments.turns.pool import EnvironmentPool
from laminar_hpc.environments.workers.interpreter import Interpreter

WORKER_NEEDS = (  # msgspec, and pydantic with what it is made of
    "msgspec",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_inspection",
    "typing_extensions",
)
MODULE = """
import importlib.util, os, sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

class Far:
    def reset(self, start: int) -> str:
        self.n = start
        return sys.executable

    def add(self, by: int) -> int:
        "Adds."
        self.n += by
        return self.n

    def seen(self) -> dict:
        "Which packages it sees."
        names = ["torch", "omegaconf", "sglang", "numpy", "pydantic"]
        return {name: importlib.util.find_spec(name) is not None for name in names}

    def get_reward(self) -> float:
        return self.n

def double(x: int) -> str:
    "Doubles."
    return f"{2 * x} by {sys.prefix}"

async def waits(x: int) -> str:
    "Waits."
    return sys.prefix
"""


def virtual_environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """The interpreter of one that sees these of our packages, by links."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for name in packages:
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None
        module = Path(found.origin).parent if found.submodule_search_locations else Path(found.origin)
        (site / module.name).symlink_to(module)
        for record in module.parent.glob(f"{name}-*.dist-info"):
            (site / record.name).symlink_to(record)
    return folder / "bin" / "python"


async def test_it_runs_under_another_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packages are that one's, also where workers are started afresh as the module has threads; a tool,
    plain or async, runs there too."""
    python = virtual_environment(tmp_path / "venv", WORKER_NEEDS)
    (tmp_path / "far_environments.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    pool = EnvironmentPool(EnvironmentConfig("far_environments.Far", python=str(python), timeout_seconds=60))
    await pool.start()
    try:
        session = await pool.open({"start": 40})
        assert session.observation == str(python)
        assert await session.call("add", {"by": "2"}) == "42" and (await session.reward()).reward == 42
        seen = await session.call("seen", {})
        assert seen == (
            '{"torch": false, "omegaconf": false, "sglang": false, "numpy": false, "pydantic": true}'
        )
        session.close()
    finally:
        await pool.close()
    tools = [f"far_environments.{name}" for name in ("double", "waits")]
    pool = EnvironmentPool(EnvironmentConfig("", tools, python=str(python), timeout_seconds=60))
    await pool.start()
    try:
        session = await pool.open({})
        prefix = str(tmp_path / "venv")
        assert await session.call("double", {"x": 4}) == f"8 by {prefix}"
        assert await session.call("waits", {"x": 4}) == prefix
        session.close()
    finally:
        await pool.close()


def test_what_cannot_run_our_worker(tmp_path: Path) -> None:
    """One line each, which says what to do."""
    bare = virtual_environment(tmp_path / "bare", ("msgspec",))
    old, mute = tmp_path / "old", tmp_path / "mute"
    old.write_text("#!/bin/sh\necho 3.8\n")
    mute.write_text("#!/bin/sh\n")
    for script in (old, mute):
        script.chmod(0o755)
    cases = [
        (bare, f"lacks pydantic, which our worker needs there: run {bare} -m pip install 'pydantic>=2.0'"),
        (old, "is Python 3.8; name one of 3.11 or newer"),
        (mute, "does not answer as a Python does; name one of 3.11 or newer"),
        (tmp_path / "none", "is no program on this machine; name the interpreter's path, as DIR/bin/python"),
        (tmp_path / "bare", f"is no program on this machine; name {bare}"),
    ]
    for path, words in cases:
        with pytest.raises(LaminarError) as error:
            Interpreter("environment.python", str(path)).check()
        assert str(error.value) == f"environment.python={path} {words}"


def test_our_own_places_are_not_told() -> None:
    """PYTHONHOME would give it our packages."""
    given = {"PYTHONHOME": "/ours", "VIRTUAL_ENV": "/ours", "PATH": os.environ["PATH"]}
    assert set(Interpreter("k", "python3").environment(given)) == {"PATH"}
