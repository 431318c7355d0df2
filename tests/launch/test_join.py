"""`laminar join`: what it takes from the run into its folder, and what it refuses, in one line each."""

import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from laminar_hpc import __version__
from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.load import dump_config, load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.bulk_door import BulkDoor
from laminar_hpc.launch import cli, join
from laminar_hpc.line.address import new_address, read_address
from laminar_hpc.line.bulk_client import BulkClient
from laminar_hpc.line.join_key import JOIN_FILE, has_joined, key_of
from laminar_hpc.line.messages.bulk import AskToJoin, JoinGranted
from laminar_hpc.machine.files.folders import slots_root
from laminar_hpc.store import status


class JoinableRun:
    """Its bulk door, over a demo's configuration with `words`."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        settings = [f"run_dir={self.run_dir}", "cluster.storage=stream", "role=controller"]
        settings.append(f"relay.shm_dir={folder}")
        self.config: RunConfig = load_config(["experiment=demo", *settings, *words])
        self.address, _ = new_address("run-1", "127.0.0.1", "there")
        self.door = BulkDoor(self.config, "store", self.address, "no-such-slots")
        self.place = self.door.key.place
        self.key = str(self.run_dir / JOIN_FILE)

    def shows(self, *roles: str) -> None:
        """What the controller writes of its members; they are on the machine `there`."""
        ranks = [status.RankStatus(role, 0, 7, "there", 0.0) for role in roles]
        queues = status.Queues(0, 0, 0, 0, 0)
        status.write(self.run_dir, status.Status(0.0, os.getpid(), "there", 0, 9, "", None, ranks, queues))

    def granted(self) -> JoinGranted:
        """What a join is told once the trainers are there."""
        self.shows("relay", "trainer")
        with closing(BulkClient(self.door.key, 20.0)) as client:
            granted, _ = client.ask(AskToJoin(__version__))
        assert isinstance(granted, JoinGranted)
        return granted

    def prepared(self, folder: Path, *words: str) -> tuple[list[str], RunConfig]:
        """The words of a rank that has joined, and what they mean to it."""
        client = BulkClient(self.door.key, 20.0)
        try:
            granted, _ = client.ask(AskToJoin(__version__))
            assert isinstance(granted, JoinGranted)
            folder.mkdir()
            settings = join.prepare(folder, self.door.key, granted, words, client)
        finally:
            client.close()
        return settings, load_config([*settings, "role=rollout"])


@pytest.fixture
def run(tmp_path):
    made = JoinableRun(tmp_path)
    made.shows("trainer", "relay")
    yield made
    made.door.close(is_over=True)


def test_a_rank_elsewhere_has_the_runs_configuration(run, tmp_path):
    """Setting by setting, but for role, folder and host; what this machine says itself goes before it. The
    controller is found in its folder."""
    away = tmp_path / "away"
    _, config = run.prepared(away, "rollout.max_concurrent=7")
    assert config.rollout.max_concurrent == 7 and config.run_dir == str(away) and config.role == "rollout"
    config.rollout.max_concurrent = run.config.rollout.max_concurrent
    config.run_dir, config.role = run.config.run_dir, run.config.role
    assert config == run.config
    assert read_address(away) == run.address
    assert has_joined(away) and key_of(away) == run.door.key and not has_joined(run.run_dir)


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=retool_7b", "model.path=${examples:arithmetic/base}"],
        [
            "data.chat_template=true",
            "data.system_prompt=a: b # c",
            "data.chat_template_arguments={x: [1, {y: 2}]}",
        ],
        ["experiment=one_gpu", "reward.functions={a: {function: laminar_hpc.environments.math.reward}}"],
        ["rollout.engine_arguments={mem-fraction-static: '0.3'}", "pipeline.max_staleness=auto:4"],
    ],
)
def test_any_configuration_crosses_as_it_is(tmp_path, words):
    """Tables, lists, texts with signs of YAML: a file of Hydra's gives what the run was started with."""
    config = load_config(words if words[0].startswith("experiment") else ["experiment=demo", *words])
    file = tmp_path / "conf" / "experiment" / "joined.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(join.as_experiment(dump_config(config)))
    assert load_config([f"--config-dir={tmp_path / 'conf'}", "experiment=joined"]) == config


def test_a_model_that_is_not_here_is_fetched(run, tmp_path, monkeypatch):
    """Byte by byte, the files that an engine needs; one that is here at the same path is taken."""
    _, config = run.prepared(tmp_path / "first")
    assert config.model.path == run.config.model.path
    real, here = Path(run.config.model.path), tmp_path / "second"
    monkeypatch.setattr(join, "_is_here", lambda *_: False)
    _, config = run.prepared(here)
    assert config.model.path == str(here / "model")
    names = {path.name for path in (here / "model").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert all((here / "model" / name).read_bytes() == (real / name).read_bytes() for name in names)


def test_what_is_missing_here_is_said_before_anything_starts(run, tmp_path):
    """A model's folder and a reward that this machine has not."""
    words = ["model.path=/nowhere/model", "reward.function=not_here.score"]
    with pytest.raises(Refused) as refused:
        run.prepared(tmp_path / "away", *words)
    lines = str(refused.value).splitlines()
    assert len(lines) == 2 and all(line.startswith("on this machine: ") for line in lines)
    assert "not_here" in lines[0] and "/nowhere/model: there is no model" in lines[1]


def test_a_relay_is_started_where_the_run_has_none(run, tmp_path, monkeypatch):
    """Once the machines of the run's relays are known, as its trainers are there."""
    run.shows("relay")
    client = BulkClient(run.door.key, 20.0)
    assert client.ask(AskToJoin(__version__))[0].relays is None
    run.shows("relay", "trainer")
    granted, _ = client.ask(AskToJoin(__version__))
    later, _ = client.ask(AskToJoin(__version__))
    client.close()
    assert granted.relays == ["there"] and granted.machine == later.machine + 1
    made, places = list[tuple[str, int]](), list[str]()

    def group(config: RunConfig, words: list[str], *_: object, **__: object) -> None:
        made.append((config.role, config.first_index))
        places.append(load_config(words).cluster.place)

    monkeypatch.setattr(join, "JoinedGroup", group)
    settings, _ = run.prepared(tmp_path / "away")
    join._groups(tmp_path / "away", granted, settings, 2)
    assert made == [("relay", granted.machine), ("rollout", 0), ("rollout", 0)]
    assert places[0] == socket.gethostname()  # encrypted, over connections of this machine's
    join._groups(tmp_path / "away", granted, [*settings, "cluster.place=paris"], 1)
    join._groups(tmp_path / "away", msgspec.structs.replace(granted, relays=[]), settings, 1)
    assert (places[3], places[5]) == ("paris", "")


OTHER_JOIN = """
import sys
from laminar_hpc.launch.machine_relays import MachineRelays
MachineRelays(sys.argv[1], sys.argv[2], lambda: print("started", flush=True) or []).look()
sys.stdin.read()
"""

WRITER = """
import sys
from pathlib import Path
from laminar_hpc.machine.locks.holder import hold
hold(Path(sys.argv[1]), 0.0)
print("started", flush=True)
sys.stdin.read()
"""


def other_process(code: str, *words: object) -> subprocess.Popen[str]:
    """One that holds something until it is killed."""
    command = [sys.executable, "-c", code, *map(str, words)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "started\n"
    return process


def made_groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Roles of the groups that a join makes from now on, in place of making them."""
    made = list[str]()
    monkeypatch.setattr(join, "JoinedGroup", lambda config, *_, **__: made.append(config.role))
    return made


@pytest.mark.parametrize("listed", [True, False])
def test_only_a_living_relay_serves_a_join(run, tmp_path, monkeypatch, listed):
    """What a killed one has left, its slots and its name with the controller, gets no weights."""
    granted, made = run.granted(), made_groups(monkeypatch)
    monkeypatch.setattr(join, "_AGAIN_SECONDS", 0.3)
    if listed:
        monkeypatch.setattr(join, "machine_name", lambda _: "there")
    settings, config = run.prepared(tmp_path / "away")
    writer = other_process(WRITER, slots_root(config.relay.shm_dir, granted.slots) / "writer")
    _, relays = join._groups(tmp_path / "away", granted, settings, 1)
    assert (made, relays) == (["rollout"], None)
    writer.kill()
    writer.communicate()
    _, relays = join._groups(tmp_path / "away", granted, settings, 1)
    assert made == ["rollout", "relay", "rollout"]
    relays.close()


def test_the_relays_of_a_join_that_has_left_are_taken_over(run, tmp_path, monkeypatch):
    """Two joins on one machine share the relays of the first, until it ends, however it does."""
    granted, made = run.granted(), made_groups(monkeypatch)
    monkeypatch.setattr(join, "machine_name", lambda _: "there")
    settings, config = run.prepared(tmp_path / "away")
    other = other_process(OTHER_JOIN, granted.slots, config.relay.shm_dir)
    _, relays = join._groups(tmp_path / "away", granted, settings, 1)
    assert relays.look() == [] and made == ["rollout"]
    other.kill()
    other.communicate()
    relays.look()
    relays.look()
    assert made == ["rollout", "relay"]
    relays.close()


@pytest.mark.parametrize(
    "words, said",
    [
        (["{place}"], "laminar join needs --key FILE"),
        (["{place}", "--key", "absent"], "absent cannot be read"),
        (["10.0.0.1", "--key", "{key}"], "10.0.0.1: write HOST:PORT"),
        (["host:99999", "--key", "{key}"], "host:99999: write HOST:PORT"),
        (["{place}", "--key", "{key}", "--replicas", "0"], "--replicas=0: write a number from 1 on"),
        (["{place}", "--key", "{key}", "relay.lanes=2"], "relay.lanes=2: that is the run's to say"),
        (["{place}", "--key", "{key}", "cluster.port=7"], "cluster.port=7: that is the run's to say"),
        (["{place}", "--key", "{key}", "role=trainer"], "role=trainer: that is the run's to say"),
        (["{place}", "--key", "{key}", "sampling.temperature=2"], "temperature=2: that is the run's to say"),
        (["{place}", "--key", "{key}", "run_dir=."], "cannot be made (File exists): name a new folder"),
        (["{place}", "--key", "{key}", "run_dir=x", "rollout.nothing=1"], "rollout.nothing"),
    ],
)
def test_what_cannot_begin_is_one_line(run, tmp_path, monkeypatch, words, said):
    """Nothing is left in the folder where it was typed."""
    (tmp_path / "typed").mkdir()
    monkeypatch.chdir(tmp_path / "typed")
    with pytest.raises(LaminarError) as refused:
        cli.run(["join", *(word.format(place=run.place, key=run.key) for word in words)])
    assert said in str(refused.value) and len(str(refused.value).splitlines()) == 1
    assert list((tmp_path / "typed").iterdir()) == []
