"""`laminar launch`: which role runs where, what is printed, and what is refused. No machine is needed: the
ssh lines are read."""

import copy
import shlex
from pathlib import Path

import pytest

from laminar_hpc.config.check import derive
from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch import cli
from laminar_hpc.launch.ssh import host
from laminar_hpc.launch.ssh.hosts import Host, assign, read_hosts

DEMO = load_config(["experiment=demo", "dry_run=true"])


def config_of(trainers: tuple[int, int, int], replicas: int, size: int) -> RunConfig:
    config = copy.deepcopy(DEMO)
    t = config.trainer
    t.tensor_parallel, t.pipeline_parallel, t.data_parallel = trainers
    config.rollout.replicas, config.rollout.tensor_parallel = replicas, size
    return config


def placed(config: RunConfig, *gpus: int) -> list[tuple[str, tuple[int, int] | None, int]]:
    hosts = [Host(f"n{number}", each) for number, each in enumerate(gpus, 1)]
    parts = assign(config, derive(config), hosts)
    assert [part.controller for part in parts] == [part.host == hosts[0] for part in parts]
    return [(part.host.name, part.trainers, part.replicas) for part in parts]


def test_the_host_file(tmp_path: Path) -> None:
    """A line per machine, comments and empty lines aside; GPUs where the line does not say are the
    default."""
    path = tmp_path / "hosts"
    path.write_text("# all\n\nn1 gpus=4\nme@10.0.0.2   # the other\n")
    assert read_hosts(path, 8) == [Host("n1", 4), Host("me@10.0.0.2", 8)]


def test_mistakes_in_the_host_file_are_all_said(tmp_path: Path) -> None:
    """One line each, with file and line; nothing that ssh would take for an option."""
    path = tmp_path / "hosts"
    path.write_text("n1 gpus=4\nn1\nn2 8\nn3 gpus=x\n-oProxyCommand=x\nslots=8\n")
    with pytest.raises(Refused) as refused:
        read_hosts(path, 0)
    said = str(refused.value).splitlines()
    assert [line.split(":")[1] for line in said] == ["2", "3", "4", "5", "6"]
    assert "n1 is there twice" in said[0] and all("write NAME or NAME gpus=N" in line for line in said[1:])
    path.write_text("# none\n")
    for wrong, words in ((path, "names no machine"), (tmp_path / "none", "cannot be read: No such file")):
        with pytest.raises(LaminarError, match=words):
            read_hosts(wrong, 0)


@pytest.mark.parametrize(
    ("trainers", "replicas", "size", "gpus", "expected"),
    [
        ((1, 1, 1), 1, 1, (0,), [("n1", (0, 1), 1)]),
        ((1, 1, 2), 3, 1, (0, 0, 0), [("n1", (0, 1), 0), ("n2", None, 2), ("n3", None, 1)]),
        ((4, 1, 4), 2, 4, (8, 8, 8), [("n1", (0, 2), 0), ("n2", (1, 2), 0), ("n3", None, 2)]),
        ((4, 1, 2), 2, 4, (0, 8, 8), [("n1", None, 0), ("n2", (0, 1), 0), ("n3", None, 2)]),  # a head alone
        ((1, 1, 2), 5, 1, (2, 2, 8), [("n1", (0, 1), 0), ("n2", None, 2), ("n3", None, 3)]),
        ((1, 1, 4), 1, 1, (4, 4, 4), [("n1", (0, 1), 0), ("n2", None, 1)]),  # n3 has nothing to do
        ((1, 1, 2), 9, 1, (2, 2, 8), [("n1", (0, 1), 0), ("n2", None, 2), ("n3", None, 7)]),
        ((1, 1, 8), 2, 1, (8, 4), [("n1", (0, 1), 0), ("n2", None, 2)]),  # a small one behind the trainers'
        ((1, 1, 4), 5, 2, (8, 8), [("n1", (0, 1), 2), ("n2", None, 3)]),  # beside trainers
        ((1, 1, 1), 1, 1, (8,), [("n1", (0, 1), 1)]),
    ],
)  # fmt: skip
def test_who_runs_where(trainers, replicas, size, gpus, expected) -> None:
    """Trainers in equal shares on the first machines, engines whole on those behind them, and beside trainers
    where they must; the controller is on the first machine, and all are placed."""
    config = config_of(trainers, replicas, size)
    found = placed(config, *gpus)
    assert found == expected
    assert sum(each for _, _, each in found) == replicas


def test_what_has_no_place_is_refused() -> None:
    """One line with the cure."""
    for config, gpus, words in (
        (config_of((4, 1, 4), 1, 1), (8,), "need 2 machines with GPUs, but there are 1: name more"),
        (
            config_of((1, 1, 8), 2, 8),
            (8, 8),
            "2 replicas of 8 GPUs .* do not fit the machines, which have room for 1 beside the trainers",
        ),
        (load_config(["experiment=one_gpu", "dry_run=true"]), (1, 1), "name the same GPUs"),
    ):
        with pytest.raises(LaminarError, match=words):
            placed(config, *gpus)


def test_the_ssh_lines(tmp_path, capsys, monkeypatch) -> None:
    """A line for each machine, as it can be typed: its part, the run's folder, the settings and the network's
    variables; nothing secret, whatever is in the environment. What they start is what launch/ starts."""
    path = tmp_path / "hosts"
    path.write_text("n1\nn2\nn3\n")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("WANDB_API_KEY", "secret-1")
    monkeypatch.setenv("HF_TOKEN", "secret-2")
    words = [
        f"--hosts={path}",
        "--ssh=-p 2222",
        "--tied",
        "experiment=demo",
        "steps=3",
        f"run_dir={tmp_path}/r x",
    ]
    assert cli.run(["launch", *words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "secret" not in said and not (tmp_path / "r x").exists()
    lines = [shlex.split(line) for line in said.splitlines() if line.startswith("ssh ")]
    assert [line[-2] for line in lines] == ["n1", "n2"] and all(
        line[-4:-2] == ["-p", "2222"] for line in lines
    )
    assert said.splitlines()[-1].split() == ["unused", "n3"]
    first, second = (shlex.split(line[-1].split(" && exec ")[1]) for line in lines)
    assert first[0] == second[0] == "env" and "NCCL_DEBUG=INFO" in first and "NCCL_DEBUG=INFO" in second
    for name in ("STORE_DIR", "ROLLOUTS", "GLOO_SOCKET_IFNAME"):  # which a machine sets for what it starts
        monkeypatch.setenv(name, "")
    started = []
    for remote in (first, second):
        options, settings = host.parsed(remote[remote.index("laminar_hpc.launch.ssh.host") + 1 :])
        assert settings == [f"run_dir={tmp_path}/r x", "experiment=demo", "steps=3"] and options.tied
        found = host.parts_of(options, settings, tmp_path, 4)
        started.append({part.role: part.words for part in found})
    assert [list(each) for each in started] == [["controller", "trainer"], ["relay", "rollout"]]
    assert "first_index=4" in started[1]["relay"] and "first_index=0" in started[0]["trainer"]


def test_machines_of_replicas_alone_need_no_folder_of_the_run(tmp_path, capsys, monkeypatch) -> None:
    """With cluster.storage=stream: their line joins the run and has no key, no setting and no path of it; the
    first machine has a relay for them. What has controller or trainers is started as ever."""
    path = tmp_path / "hosts"
    path.write_text("n1\nn2\nn3\n")
    words = [f"--hosts={path}", "experiment=demo", "cluster.storage=stream", "rollout.replicas=3"]
    assert cli.run(["launch", *words, f"run_dir={tmp_path}/r", "--dry-run"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("ssh ")]
    assert [line[-2] for line in lines] == ["n1", "n2", "n3"]
    first, *others = (line[-1] for line in lines)
    assert [line.split("laminar ")[1] for line in others] == [
        "join --key - --replicas=2",
        "join --key - --replicas=1",
    ]
    assert not [line for line in others if f"{tmp_path}/r" in line or "experiment" in line]
    for name in ("STORE_DIR", "ROLLOUTS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    remote = shlex.split(first)
    options, settings = host.parsed(remote[remote.index("laminar_hpc.launch.ssh.host") + 1 :])
    found = host.parts_of(options, settings, tmp_path, 0)
    assert [(part.role, part.processes) for part in found] == [
        ("controller", 1),
        ("trainer", 1),
        ("relay", 1),
    ]
    config = config_of((4, 1, 4), 2, 4)
    config.cluster.storage = "stream"
    parts = assign(config, derive(config), [Host(f"n{n}", 8) for n in (1, 2, 3)])
    assert [(part.relay, part.joins) for part in parts] == [(True, False), (False, False), (False, True)]
    alone = assign(load_config(["experiment=demo", "cluster.storage=stream"]), derive(DEMO), [Host("n1", 0)])
    assert [(part.relay, part.joins, part.replicas) for part in alone] == [(False, False, 1)]


def test_mistakes_on_the_command_line(tmp_path) -> None:
    """Before anything starts, one line each."""
    path = tmp_path / "hosts"
    path.write_text("n1\nn2\n")
    for words, said in (
        (["experiment=demo"], "needs a host file"),
        ([f"--hosts={path}"], "and what laminar train needs"),
        (
            [f"--hosts={path}", "experiment=demo", "--only=n9", "--dry-run"],
            "--only=n9: no machine .*: n1, n2",
        ),
        ([f"--hosts={path}", "experiment=demo", "--ssh='x", "--dry-run"], "quote it as in a shell"),
        ([f"--hosts={path}", "experiment=demo", "steps=0", "--dry-run"], "steps=0"),
    ):
        with pytest.raises(LaminarError, match=said):
            cli.run(["launch", *words])


def test_a_machine_without_the_run_s_folder_refuses(tmp_path, monkeypatch) -> None:
    """What the launcher has written is awaited, then missed; another version is named."""
    monkeypatch.setattr(host, "_SEEN_SECONDS", 0.0)
    with pytest.raises(Refused, match=r"launch\.ab is not seen here: run_dir must be on a file system"):
        host.check_here(tmp_path, "ab")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "launch.ab").write_text("0.0.0\n")
    with pytest.raises(Refused, match=r"is installed here and 0\.0\.0 where it was launched"):
        host.check_here(tmp_path, "ab")
    host.check_here(tmp_path, "")


def test_a_span_of_replicas_begins_with_its_smallest_number() -> None:
    """And needs a program that starts the others."""
    config = config_of((1, 1, 1), 2, 1)
    config.rollout.replicas = "2:6"
    with pytest.raises(LaminarError, match=r"rollout.replicas=2:6: on several machines name a program"):
        placed(config, 1, 4)
    config.cluster.scale_command = "/bin/true"
    assert placed(config, 1, 4) == [("n1", (0, 1), 0), ("n2", None, 2)]
