"""The engine as a process: it dies with its parent, a failed start is one line, and stopping leaves
nothing."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from helpers.engines.pair import engine_config, make_model
from helpers.processes import ended
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine import leftovers
from laminar_hpc.engine.interface import EngineDied
from laminar_hpc.engine.sglang.process import FOREIGN_VARIABLES, EngineProcess, hold_port, last_log_line
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.machine.compat import cuda_toolkit
from laminar_hpc.machine.files.folders import ENGINE_FOLDER_PREFIX, OWNER_FILE
from laminar_hpc.machine.files.shared_memory import noted

PARENT = """
import asyncio, json, sys
from pathlib import Path
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.sglang.server import SglangServer

async def main(model, folder):
    config = RunConfig()
    config.model.path = model
    config.rollout.tensor_parallel = 2
    engine = SglangServer(config, 0, Path(folder))
    await engine.start(Path(model), 0, 1)
    print(json.dumps(engine.process.pid), flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module")
def parent(model: Path, tmp_path_factory: pytest.TempPathFactory):
    """A process with an engine, as a rollout rank is one."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model), str(tmp_path_factory.mktemp("parent"))],
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_start_that_fails_is_one_line(parent, tmp_path, monkeypatch):
    """The error is SGLang's own last word with the path of its log. (`parent` comes up meanwhile.)"""
    broken = make_model(tmp_path / "broken", 1)
    (broken / "model.safetensors").unlink()

    async def start() -> None:
        engine = SglangServer(engine_config(broken), 3, tmp_path)
        try:
            await engine.start(broken, 0, 1)
        finally:
            folder = engine.process.folder
            await engine.stop()
            assert folder is not None and not folder.exists()

    with pytest.raises(EngineDied) as death:
        asyncio.run(start())
    assert "\n" not in str(death.value) and str(tmp_path / "logs" / "engine3.log") in str(death.value)
    assert "engine 3 died" in str(death.value) and "broken" in str(death.value)


def test_a_worker_needs_no_torch():
    """Each rollout rank and each engine's launcher would pay for it: seconds of a core, and 200 MB for as
    long as it runs."""
    code = (
        "import laminar_hpc.rollout.role, laminar_hpc.engine.sglang.plugin.serve, sys; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.slow
def test_no_process_outlives_the_rank(parent):
    """kill -9 of a rollout rank takes the server, the schedulers and the detokenizer with it; the next start
    removes what it leaves: the engine's files, and the shared memory in which its tensor-parallel ranks
    talk."""
    engine = psutil.Process(json.loads(parent.stdout.readline()))
    family = [engine, *engine.children(recursive=True)]
    names = [process.cmdline()[0] for process in family]
    assert [
        sum(name.startswith(f"sglang::{role}") for name in names) for role in ("scheduler", "detokenizer")
    ] == [2, 1]
    folder = next(
        path
        for path in Path(tempfile.gettempdir()).glob(f"{ENGINE_FOLDER_PREFIX}*")
        if (path / OWNER_FILE).is_file() and (path / OWNER_FILE).read_text().split()[0] == str(parent.pid)
    )
    segments = {
        Path(file.path)
        for process in family
        for file in process.open_files()
        if file.path.startswith("/dev/shm/")
    }
    assert segments and set(noted(folder)) == segments
    parent.send_signal(signal.SIGKILL)
    assert ended(family)
    parent.wait()
    assert folder in [each.path for each in leftovers.clean()] and not folder.exists()
    assert not [path for path in segments if path.exists()]


def test_an_engine_that_does_not_answer_in_time(model, tmp_path):
    """The wait for the start is bounded, and its error names the setting and the log."""
    config = engine_config(model)
    config.rollout.engine_start_seconds = 0.2

    async def start() -> None:
        engine = SglangServer(config, 4, tmp_path)
        try:
            await engine.start(model, 0, 1)
        finally:
            await engine.stop()

    t0 = time.monotonic()
    with pytest.raises(
        LaminarError, match=r"engine 4 did not answer within rollout\.engine_start_seconds=0\.2.*engine4\.log"
    ):
        asyncio.run(start())
    assert time.monotonic() - t0 < 10


def test_an_engine_that_was_never_started_can_be_stopped(tmp_path, monkeypatch):
    """A replica that ends before its start removes nothing, least of all the folder it was started in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").touch()
    asyncio.run(EngineProcess("engine 5", tmp_path / "log", 1).stop())
    assert (tmp_path / "precious").exists()


def test_last_log_line(tmp_path):
    """The last error of a log, else its last line."""
    log = tmp_path / "log"
    assert last_log_line(log) == "it left no log"
    log.write_text("[12:00] loading\nValueError: no room\n  at x\nkill_process_tree called\n")
    assert last_log_line(log) == "ValueError: no room"
    log.write_text("one\ntwo\n\n")
    assert last_log_line(log) == "two"


def test_what_torchrun_says_to_its_ranks_does_not_reach_the_engine():
    """Its torch.distributed would wait for the trainers' store otherwise."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "GROUP_RANK",
        "MASTER_ADDR",
        "TORCHELASTIC_USE_AGENT_STORE",
        "SLURM_PROCID",
    ):
        assert FOREIGN_VARIABLES.match(name), name
    for name in ("PATH", "HOME", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "PYTHONPATH", "RANKING"):
        assert not FOREIGN_VARIABLES.match(name), name


async def test_a_held_port_is_its_servers_alone():
    """Nobody else may bind it meanwhile, a server that comes late may."""
    with hold_port() as held:
        place = held.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(place)
        server = await asyncio.start_server(lambda _, writer: writer.close(), *place)
        _, writer = await asyncio.open_connection(*place)
        writer.close()
        server.close()


def test_an_engine_on_a_gpu_is_told_of_the_compiler(tmp_path, monkeypatch):
    """Promise: SGLang and flashinfer find nvcc and ninja without a word in the user's shell, and Triton does
    not round float32 to TF32; on the CPU none of it is set."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    monkeypatch.setattr(cuda_toolkit, "wheels", lambda: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    process = EngineProcess("engine 0", tmp_path / "engine0.log", 1)
    process.folder = tmp_path
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    told = process.environment()
    assert told["PATH"].split(":")[:2] == [str(tmp_path / "bin"), str(Path(sys.prefix) / "bin")]
    assert (told["CUDA_HOME"], told["TRITON_F32_DEFAULT"]) == (str(tmp_path), "tf32x3")
    assert "TORCH_COMPILE_DISABLE" not in told
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "TRITON_F32_DEFAULT" not in process.environment()


def test_log_probs_are_at_the_sampling_temperature_whatever_the_shell_says(tmp_path, monkeypatch):
    """With SGLang's SGLANG_RETURN_ORIGINAL_LOGPROB they would be at temperature 1, and every ratio wrong."""
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    process = EngineProcess("engine 0", tmp_path / "engine0.log", 1)
    process.folder = tmp_path
    assert process.environment()["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
