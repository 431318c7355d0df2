"""Weights & Biases by a flag: real wandb in offline mode; nothing leaks, nothing goes wrong in more than one
line."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laminar_hpc.config.check import check
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.machine.observability.wandb_mirror import check_wandb, without_key

KEY = "0123456789abcdef0123456789abcdef01234567"  # of the form that wandb's keys have

PROGRAM = """
import sys
from pathlib import Path
from laminar_hpc.machine.observability.metrics import MetricsWriter
from laminar_hpc.machine.observability.wandb_mirror import WandbMirror

run_dir = Path(sys.argv[1])
config = {"steps": 3, "model": {"path": "m"}}
writer = MetricsWriter(run_dir, WandbMirror(run_dir, "offline", "laminar", config))
writer.write("start", restored_step=None, pipeline="laminar", derived={})
for step in range(1, 4):
    writer.write("step", step=step, reward_mean=step / 4, parts={"load": 0.5})
writer.write("lost", trajectory_id=3, attempt=0, reason="no curve")
writer.write("end", reason="done", step=3)
writer.close()
assert "torch" not in sys.modules, "the controller loads no torch"
"""


OFFLINE_SERVER = """
import os, sys
from pathlib import Path
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.machine.observability import wandb_mirror

wandb_mirror.START_SECONDS = 3.0
try:
    wandb_mirror.WandbMirror(Path(sys.argv[1]), "online", "laminar", {})
except LaminarError as error:
    print(error, flush=True)
    os._exit(1)  # as a rank ends
"""


READER = """
import json, sys
from pathlib import Path
from google.protobuf.json_format import MessageToDict
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal.datastore import DataStore

for path in sorted(Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")):
    store = DataStore()
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        content = MessageToDict(record, preserving_proto_field_name=True)
        print(json.dumps({record.WhichOneof("record_type"): content}))
"""


def records(run_dir: Path) -> list[tuple[str, dict]]:
    """Kind and content of the offline files' records, by wandb's own reader; in a process where little else
    makes its import slow."""
    done = mirror(run_dir, READER)
    assert done.returncode == 0, done.stderr
    return [next(iter(json.loads(line).items())) for line in done.stdout.splitlines()]


def mirror(run_dir: Path, program: str = PROGRAM, **environment: str) -> subprocess.CompletedProcess:
    command, environment = [sys.executable, "-c", program, str(run_dir)], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.mark.slow
def test_offline_holds_the_curves_of_tensorboard_and_no_key(tmp_path):
    """Promise: `observability.wandb=offline` needs no network; what is written has the curves, and the API
    key is nowhere."""
    done = mirror(tmp_path, WANDB_API_KEY=KEY)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), (
        "wandb writes nothing between our lines"
    )
    found = records(tmp_path)
    history = [record["history"]["item"] for kind, record in found if kind == "history"]
    rows = [
        {item.get("key") or "/".join(item["nested_key"]): float(item["value_json"]) for item in items}
        for items in history
    ]
    assert [row["step/reward_mean"] for row in rows] == [0.25, 0.5, 0.75]
    assert [row["trainer_step"] for row in rows] == [1, 2, 3] and rows[0]["step/parts/load"] == 0.5
    assert not {kind for kind, _ in found} & {"stats", "output", "output_raw"}
    begun = [record["run"] for kind, record in found if kind == "run"]
    assert begun and all(
        run.get("host", "") in ("", "-") and not run.get("git", {}).get("remote_url") for run in begun
    )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]

    first = (tmp_path / "wandb" / "id").read_text()
    assert mirror(tmp_path).returncode == 0
    runs = list(tmp_path.glob("wandb/offline-run-*"))
    assert (
        (tmp_path / "wandb" / "id").read_text() == first and runs and all(first in path.name for path in runs)
    ), "resumed: the same run"


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_without_the_package_one_line_says_what_to_do(monkeypatch, mode):
    """Promise: wandb is optional; asking for it where it is not installed is refused before anything
    starts."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else found(name, *rest)
    )
    with pytest.raises(
        LaminarError,
        match=f"observability.wandb={mode} needs the package wandb.*pip install "
        "wandb.*observability.wandb=off",
    ):
        check_wandb(mode)
    check_wandb("off")


def test_online_without_a_key_is_refused_instead_of_asking_for_one(monkeypatch, tmp_path):
    """Promise: a run never waits for somebody to type a key."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(LaminarError, match="no API key: run `wandb login`"):
        check_wandb("online")
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    (tmp_path / "netrc").chmod(0o600)
    check_wandb("online")


def test_online_without_a_network_fails_in_one_line_without_the_key(tmp_path):
    """Promise: a server that cannot be reached is named as the cause, in a bounded time, and the key is not
    in the text."""
    done = mirror(tmp_path, OFFLINE_SERVER, WANDB_API_KEY=KEY, WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 1 and len(done.stdout.splitlines()) == 1, done.stderr
    assert (
        "observability.wandb=online: wandb could not start" in done.stdout
        and "set observability.wandb=offline" in done.stdout
    )
    assert KEY not in done.stdout + done.stderr


def test_a_key_in_a_librarys_words_is_blotted_out(monkeypatch):
    """Promise: our lines and logs never hold the key."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert without_key(f"401 for {KEY}") == "401 for ***"


def test_other_values_are_refused():
    """Promise: a wrong value is refused with those there are."""
    with pytest.raises(LaminarError, match=r"observability.wandb=yes: use one of off, offline, online"):
        check(load_config(["experiment=demo", "observability.wandb=yes"]))
