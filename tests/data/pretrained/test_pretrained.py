"""model.path=OWNER/NAME: downloaded once, whole, at one commit; and one line where that cannot be."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from helpers.models.hub_server import REPO, Hub, files_of
from helpers.paths import EXAMPLES
from laminar_hpc.config.check import check
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import dump_config, load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.data.pretrained import (
    download_model,
    follow,
    pinned_words,
    prepare_rank,
    recorded_name,
    resolve_model,
)
from laminar_hpc.data.pretrained import hub as adapter

BASE = EXAMPLES / "arithmetic/base"
WEIGHTS = "model.safetensors"


def loaded(*words: str, name: str = REPO) -> RunConfig:
    return load_config(["experiment=demo", f"model.path={name}", *words])


def resolved(*words: str, name: str = REPO) -> RunConfig:
    """As a start does it; the lines for the user are dropped."""
    config = resolve_model(loaded(*words, name=name), lambda _: None)
    download_model(config, lambda _: None)
    return config


def refused(name: str = REPO, *words: str) -> str:
    with pytest.raises(LaminarError) as error:
        resolved(*words, name=name)
    text = str(error.value)
    assert text.startswith(f"model.path={name.partition('@')[0]}") and "\n" not in text
    return text


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


# ---- what is downloaded ----------------------------------------------------------------------


def test_a_name_becomes_a_directory_with_the_needed_files_only(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    """Promise: the folder is a model directory that passes the checks, equal to what the hub has, without its
    other files; the cache is used ever after, also without the hub; its path tells name and commit."""
    said: list[str] = []
    config = resolve_model(loaded(), said.append)
    check(config)
    assert not said and hub.gets == {"config.json": 1}
    download_model(config, said.append)
    assert files_of(Path(config.model.path)) == files_of(BASE)
    commit = hub.branches["main"]
    assert [line.split(": ")[1].split()[0] for line in said] == ["downloading", "downloaded"] and commit[
        :12
    ] in said[0]
    assert str(recorded_name(config.model.path)) == f"{REPO}@{commit}"
    assert pinned_words(loaded(), config) == [f"model.path={REPO}@{commit}"]

    before = hub.requests
    assert resolved(name=f"{REPO}@{commit}").model.path == config.model.path and hub.requests == before, (
        "a commit in the cache asks nobody"
    )
    offline(monkeypatch)
    said.clear()
    again = resolve_model(loaded(), said.append)
    download_model(again, said.append)
    assert again == config and hub.requests == before
    assert len(said) == 1 and f"taking commit {commit[:12]} from the cache, as HF_HUB_OFFLINE=1" in said[0]


def test_a_dry_run_takes_the_configuration_only(hub: Hub):
    """Promise: dry_run=true downloads no weights, and says what a run would."""
    said: list[str] = []
    config = resolve_model(loaded("dry_run=true"), said.append)
    check(config)
    assert hub.gets == {"config.json": 1} and "would download" in said[0]


def test_of_many_weight_files_those_of_the_index(hub: Hub):
    """Promise: a model in shards is fetched by its index; another format beside it is not."""
    files, index = (
        files_of(BASE),
        b'{"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}',
    )
    files |= {f"model-{n}-of-2.safetensors": files[WEIGHTS][:n] for n in (1, 2)} | {
        "model.safetensors.index.json": index
    }
    hub.push(files)
    folder = Path(resolved().model.path)
    assert {path.name for path in folder.glob("*.safetensors")} == {
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
    }


def test_a_directory_wins(hub: Hub, tmp_path: Path):
    """Promise: a local directory wins, and a name in an existing folder is a path; the hub is not asked."""
    (tmp_path / REPO).mkdir(parents=True)
    config = loaded()
    assert resolve_model(config, print) is config and not pinned_words(config, config)
    assert resolve_model(loaded(name="acme/other"), print).model.path == "acme/other"
    assert hub.requests == 0


# ---- one commit per run ----------------------------------------------------------------------


def test_a_resumed_run_keeps_its_commit(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Promise: the run's config.yaml pins the commit. resume=auto takes it although the branch has moved,
    also by name@commit as ranks get it; another revision is refused; a fresh run takes the newest."""
    words = (f"run_dir={tmp_path}/run", "resume=auto")
    first = resolved(*words)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(dump_config(first))
    newest = hub.push(files_of(BASE) | {"config.json": (BASE / "config.json").read_bytes() + b"\n"})
    assert resolved(*words).model.path == first.model.path
    assert resolved(*words, name=str(recorded_name(first.model.path))).model.path == first.model.path
    assert "leave the revision out to go on" in refused(f"{REPO}@main", *words)
    assert recorded_name(resolved(words[0]).model.path).revision == newest


def test_ranks_take_the_controllers_commit(hub: Hub):
    """Promise: where a branch moved between two ranks' looks, the rank that joins follows the controller."""
    controllers = recorded_name(resolved().model.path)
    hub.push(files_of(BASE) | {"config.json": (BASE / "config.json").read_bytes() + b"\n"})
    mine = resolved()
    assert recorded_name(mine.model.path) != controllers
    assert recorded_name(follow(mine, str(controllers)).model.path) == controllers
    assert follow(mine, "") is mine


def test_ranks_that_start_together_download_once(hub: Hub):
    """Promise: of several processes one downloads, the others wait for its lock and find the files."""
    hub.seconds_per_part = 0.05
    program = f"""
from laminar_hpc.config.load import load_config
from laminar_hpc.data.pretrained import prepare_rank
print(prepare_rank(load_config(["experiment=demo", "model.path={REPO}"]), print, print).model.path)
"""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[0].splitlines() for rank in ranks]
    assert len({lines[-1] for lines in said}) == 1 and all(len(lines) == 1 for lines in said[1:]), (
        "only the first rank speaks"
    )
    assert hub.gets[WEIGHTS] == 1 and files_of(Path(said[0][-1])) == files_of(BASE)


def test_another_machines_trouble_is_said_there(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    """Promise: where only a torchrun's second machine has no access, its first rank says so, with its
    name."""
    hub.token = "secret"
    monkeypatch.setenv("RANK", "8")
    said: list[str] = []
    for local in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local)
        with pytest.raises(LaminarError):
            prepare_rank(loaded(), print, said.append)
    assert len(said) == 1 and said[0].startswith(f"on {socket.gethostname()}: model.path={REPO}")


# ---- trouble ---------------------------------------------------------------------------------


def test_a_half_download_is_never_used(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    """Promise: a broken connection is one line; what it left is refused offline, and completed online."""
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the library's between two tries
    hub.cut_after = 100_000
    assert "the download broke off" in refused() and "start again" in refused()
    hub.cut_after = None
    with monkeypatch.context() as patched:
        offline(patched)
        assert "offline mode is enabled" in refused() and "HF_HUB_OFFLINE" in refused()
    assert files_of(Path(resolved().model.path)) == files_of(BASE)


def test_missing_side_files_make_a_folder_incomplete(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    """Promise: weights and tokenizer alone are no model: generation_config.json may say where responses
    end."""
    folder = Path(resolved().model.path)
    (folder / "generation_config.json").unlink()
    with monkeypatch.context() as patched:
        offline(patched)
        assert "HF_HUB_OFFLINE" in refused()
    assert resolved().model.path == str(folder) and (folder / "generation_config.json").is_file()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "acme/nothing",
            "Repository Not Found for url",
        ),
        (f"{REPO}@v9", "Revision Not Found for url"),
        (f"{REPO}@{'0' * 40}", "check name and revision"),
    ],
)
def test_a_wrong_name_is_one_line(hub: Hub, name: str, words: str):
    """Promise: what is wrong with the name, and the cure."""
    assert words in refused(name)


def test_no_access_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    """Promise: gated, private, a hub that is not there or never answers, each in one line and soon."""
    hub.gated = True
    assert f"accept its terms at https://huggingface.co/{REPO}, then set HF_TOKEN" in refused()
    hub.gated, hub.token = False, "hf_secret"
    assert "set HF_TOKEN for a private one" in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "hf_wrong" not in refused()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the Hub could not be reached" in refused()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{mute.getsockname()[1]}")
        monkeypatch.setattr(adapter, "_REQUEST_SECONDS", 0.3)
        assert "Timeout" in refused()
    assert not hub.gets


def test_a_model_that_cannot_be_trained_is_refused_before_its_weights(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
):
    """Promise: no tokenizer.json, safetensors, config.json, or room: known before gigabytes are on their
    way."""
    whole = files_of(BASE)
    for missing, words in (
        ("tokenizer.json", "no tokenizer.json"),
        (WEIGHTS, "safetensors weights"),
        ("config.json", "config.json"),
    ):
        hub.push({name: data for name, data in whole.items() if name != missing})
        assert words in refused()
    hub.push({**whole, "model.safetensors.index.json": b"{}"})
    with pytest.raises(LaminarError, match="is no index of safetensors files"):
        resolved()
    hub.push({**whole, "merges.txt": b""})
    monkeypatch.setattr(adapter.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    assert "1.8 MB are to be downloaded" in refused() and "HF_HOME" in refused()
    assert not hub.gets[WEIGHTS]


def test_the_command_line(hub: Hub):
    """Promise: HF_ENDPOINT, HF_HOME and HF_TOKEN are honoured; exit code 2; the token is said nowhere."""
    hub.token = "hf_secret"
    command = [
        sys.executable,
        "-m",
        "laminar_hpc.launch.cli",
        "train",
        "experiment=demo",
        f"model.path={REPO}",
        "dry_run=true",
    ]
    without = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (
        without.returncode == 2
        and without.stderr.startswith(f"laminar: error: model.path={REPO}")
        and without.stderr.count("\n") == 1
    )
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "HF_TOKEN": "hf_secret"},
    )
    assert (
        done.returncode == 0 and "parameters" in done.stdout and "hf_secret" not in done.stdout + done.stderr
    )


def test_ctrl_c_ends_a_download_at_once(hub: Hub):
    """Promise: no wait for the file under way, which may take an hour."""
    hub.seconds_per_part = 3.0
    command = [
        sys.executable,
        "-m",
        "laminar_hpc.launch.cli",
        "train",
        "experiment=demo",
        f"model.path={REPO}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert "downloading" in process.stdout.readline()
        deadline = time.monotonic() + 30
        while not hub.gets[WEIGHTS] and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        asked = time.monotonic()
        assert process.wait(20) == -signal.SIGINT and time.monotonic() - asked < 2
    finally:
        process.kill()
