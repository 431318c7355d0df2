"""`laminar submit`: every experiment has its jobs on the nodes and GPUs that its file names. No Slurm is
needed: the sbatch lines are read."""

import dataclasses
import os
import re
import shlex
from pathlib import Path

import pytest

from laminar_hpc.config.check import derive
from laminar_hpc.config.directories import conf_directory
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import group_names, load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch import cli
from laminar_hpc.launch.slurm import submit
from laminar_hpc.launch.slurm.layout import layout
from laminar_hpc.launch.slurm.node import NodePlace, local_store, parts
from laminar_hpc.launch.slurm.patience import patience
from laminar_hpc.launch.slurm.scaling import scale_words
from laminar_hpc.machine.devices import devices_of
from laminar_hpc.machine.locks.run_lock import RunLock
from laminar_hpc.machine.roles import RoleOfRank

FOLDER = conf_directory() / "experiment"
EXPERIMENTS = group_names(FOLDER)
# script -> nodes, GPUs on each, processes on each; of the array of rollouts a node per element
EXPECTED = {
    "cluster_1024gpu_72b": {"control": (1, 0), "trainer": (96, 8), "rollouts": (32, 8)},
    "cluster_128gpu_235b_a22b": {"control": (1, 0), "trainer": (12, 8), "rollouts": (4, 8)},
    "cluster_64gpu_32b": {"control": (1, 0), "trainer": (4, 8), "rollouts": (4, 8)},
    "cluster_64gpu_32b_128k": {"control": (1, 0), "trainer": (4, 8), "rollouts": (4, 8)},
    "demo": {"laminar_single": (1, 0)},
    "lora": {"laminar_single": (1, 0)},
    "moe": {"laminar_single": (1, 0)},
    "node_8gpu_30b_a3b": {"laminar_single": (1, 8)},
    "node_8gpu_72b_lora": {"laminar_single": (1, 8)},
    "node_8gpu_7b": {"laminar_single": (1, 8)},
    "one_gpu": {"laminar_single": (1, 1)},
    "one_gpu_7b_lora": {"laminar_single": (1, 1)},
    "retool_32b": {"control": (1, 0), "trainer": (2, 8), "rollouts": (2, 8)},
    "retool_7b": {"laminar_single": (1, 8)},
    "tools": {"laminar_single": (1, 0)},
}


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, tuple[dict[str, str], list[str]]]:
    """By script, the variables and options of what would be submitted."""
    assert cli.run(["submit", "--dry-run", *words]) == 0
    found = {}
    for line in capsys.readouterr().out.splitlines():
        words_of = shlex.split(line)
        begin = words_of.index("sbatch")
        script = next(word for word in words_of if word.endswith(".sbatch"))
        assert Path(script).is_file()
        variables = dict(word.split("=", 1) for word in words_of[:begin])
        found[Path(script).stem] = variables, words_of[begin:]
    return found


def nodes_and_gpus(options: list[str]) -> tuple[int, int]:
    text = " ".join(options)
    array, nodes = re.search(r"--array=0-(\d+)", text), re.search(r"--nodes=(\d+)", text)
    gpus = re.search(r"--gpus-per-node=(\d+)", text)
    return int(array[1]) + 1 if array else int(nodes[1]) if nodes else 1, int(gpus[1]) if gpus else 0


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_its_jobs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: one command submits it on the nodes and GPUs that its file names, and each rank has GPUs of
    its own there (but for a file that shares one)."""
    jobs = lines(capsys, f"experiment={name}")
    assert {script: nodes_and_gpus(options) for script, (_, options) in jobs.items()} == EXPECTED[name]
    header = (FOLDER / f"{name}.yaml").read_text().split("run_dir:")[0]
    assert "GPUs" not in header or f"laminar submit experiment={name}" in header
    config = load_config([f"experiment={name}", "dry_run=true"])
    derived = derive(config)
    if "laminar_single" in jobs:
        assert jobs["laminar_single"][0]["NPROC_PER_NODE"] == str(derived.world_size)
        return
    total = sum(nodes * gpus for nodes, gpus in EXPECTED[name].values())
    assert total == derived.gpus_unless_shared
    for role, script, ranks in (
        ("trainer", "trainer", derived.trainer_ranks),
        ("rollout", "rollouts", derived.rollout_ranks),
    ):
        nodes, gpus = EXPECTED[name][script]
        here = [RoleOfRank(role, index) for index in range(ranks // nodes)]
        replicas = derived.rollout_ranks // EXPECTED[name]["rollouts"][0]
        assert len(here) * nodes == ranks and jobs["rollouts"][0]["ROLLOUTS"] == str(replicas)
        config.role = role
        used = [device for mine in here for device in devices_of(config, here, mine, gpus)]
        assert sorted(used) == list(range(gpus))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_one_heterogeneous_job(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: with --hetjob it is one sbatch, whose three components have the nodes and GPUs that a job of
    each role would have; what is for one role, and for all, is in its component."""
    words = [f"experiment={name}", "--slurm=--time=9", "--rollouts=--qos=low"]
    if name.startswith("one_gpu"):
        with pytest.raises(LaminarError, match=r"--hetjob: .* the same GPUs"):
            cli.run(["submit", "--dry-run", "--hetjob", *words])
        return
    apart = lines(capsys, "--apart", *words)
    ((script, (variables, sbatch)),) = lines(capsys, "--hetjob", *words).items()
    assert script == "laminar_hetjob" and variables["ROLLOUTS"] == apart["rollouts"][0]["ROLLOUTS"]
    options = sbatch[1 : next(at for at, word in enumerate(sbatch) if word.endswith(".sbatch"))]
    parts = [part.split() for part in " ".join(options).split(" : ")]
    expected = [nodes_and_gpus(apart[role][1]) for role in ("control", "trainer", "rollouts")]
    assert [nodes_and_gpus(part) for part in parts] == expected
    assert all("--time=9" in part for part in parts) and ["--qos=low" in part for part in parts] == [0, 0, 1]
    assert sbatch[-1] == apart["trainer"][1][-1] == f"experiment={name}"


def config_of(trainer: tuple[int, int, int], replicas: int, size: int) -> RunConfig:
    config = load_config(["experiment=demo", "dry_run=true"])
    t = config.trainer
    t.tensor_parallel, t.pipeline_parallel, t.data_parallel = trainer
    config.rollout.replicas, config.rollout.tensor_parallel = replicas, size
    return config


@pytest.mark.parametrize(
    ("trainer", "replicas", "size", "gpus", "nodes", "elements", "each"),
    [
        ((4, 1, 3), 4, 2, 8, 3, 1, 4),  # 12 trainers in whole groups of 4: not 6 on a node
        ((2, 1, 6), 9, 1, 8, 2, 2, 5),  # 6 on each of two; 9 replicas as 5 and 5
        ((1, 1, 7), 3, 4, 4, 7, 3, 1),
        ((8, 2, 1), 2, 8, 8, 2, 2, 1),
        ((8, 1, 1), 1, 4, 4, 2, 1, 1),  # a group over two nodes
    ],
)
def test_nodes_follow_from_the_layout(
    trainer: tuple[int, int, int], replicas: int, size: int, gpus: int, nodes: int, elements: int, each: int
) -> None:
    """Promise: trainers in whole tensor-parallel groups, equally many on each node; engines whole."""
    config = config_of(trainer, replicas, size)
    control, trainers, rollouts = layout(config, derive(config), gpus, False)
    per_node = trainer[0] * trainer[1] * trainer[2] // nodes
    assert control.options == ()
    assert trainers.options == (f"--nodes={nodes}", f"--gpus-per-node={per_node}")
    assert rollouts.options == (f"--array=0-{elements - 1}", f"--gpus-per-node={each * size}")
    assert rollouts.environment == (("ROLLOUTS", str(each)),)


def test_what_has_no_place_is_refused() -> None:
    """Promise: one line with the cure."""
    config = config_of((1, 1, 1), 1, 8)
    with pytest.raises(LaminarError, match=r"rollout.tensor_parallel=8: .* --gpus-per-node=4; lower it"):
        layout(config, derive(config), 4, True)
    shared = load_config(["experiment=one_gpu", "dry_run=true"])
    with pytest.raises(LaminarError, match=r"--apart: .* the same GPUs"):
        layout(shared, derive(shared), 8, True)
    replay = load_config(["experiment=demo", "dry_run=true"])
    replayed = dataclasses.replace(derive(replay), rollout_ranks=0)
    with pytest.raises(LaminarError, match="--hetjob: a replay has no rollouts"):
        layout(replay, replayed, 8, False, True)
    place = NodePlace("trainer", 0, 2, Path("run"), "1.0", None)
    with pytest.raises(LaminarError, match=r"1 trainers .* do not divide into 2 nodes"):
        parts(place, config, [], "10.0.0.1")


def test_each_node_starts_its_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Promise: ranks are numbered over the nodes, each role is told its own address, and the controller
    keeps its store on a local disk and waits for one replica only."""
    monkeypatch.setenv("STORE_DIR", "/local")
    monkeypatch.delenv("ROLLOUTS", raising=False)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    config = config_of((2, 1, 4), 4, 4)
    assert local_store(tmp_path).parent == Path("/local")
    assert local_store(tmp_path) != local_store(tmp_path / "other")

    def start(role: str, node: int = 0, machine: int = 0) -> dict[str, str]:
        place = NodePlace(role, node, 2, tmp_path, "7.0", None)
        made = parts(place, config, ["steps=3"], "10.0.0.9", machine)
        return {part.role: f"{part.role} {part.processes} {' '.join(part.words)}" for part in made}

    common = f"run_dir={tmp_path} cluster.host=10.0.0.9"
    assert start("trainer", 1) == {"trainer": f"trainer 4 {common} first_index=4 steps=3 resume=auto"}
    assert start("controller") == {
        "controller": f"controller 1 {common} store_dir={local_store(tmp_path)} rollout.replicas_min=1 "
        "steps=3 resume=auto"
    }
    config.relay.lanes = 2
    assert start("rollouts", 0, 3) == {
        "relay": f"relay 2 {common} first_index=6 steps=3 resume=auto",
        "rollout": f"rollout 2 {common} steps=3 resume=auto",
    }
    monkeypatch.setenv("ROLLOUTS", "none")
    with pytest.raises(LaminarError, match="ROLLOUTS=none"):
        start("rollouts")


# ---- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for sbatch, which notes its call and gives out ids from 70; it refuses the partition
    `none`."""
    calls = tmp_path / "calls"
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\ncase $* in *partition=none*) echo 'sbatch: error: no such partition' >&2; exit 1;; esac\n"
        f'echo "$RUN_DIR $ROLLOUTS $*" >> {calls}\necho $((69 + $(wc -l < {calls})))\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return calls


def test_jobs_are_submitted_and_what_next_is_said(
    sbatch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: each sbatch gets our script, the settings without those that the scripts make, and its own
    options; ids, and the lines to watch, stop and cancel, are printed."""
    words = ["submit", "experiment=demo", "run_dir=runs/mine", "resume=auto", "--apart", "--slurm=--time=9"]
    assert cli.run([*words, "--rollouts", "--partition=spot -A me", "rollout.replicas=2"]) == 0
    control, trainer, rollouts = sbatch.read_text().splitlines()
    run_dir = tmp_path / "runs/mine"
    assert control.startswith(f"{run_dir}  --parsable --time=9 /") and "control.sbatch" in control
    assert "--nodes=1 --time=9 /" in trainer
    assert rollouts.startswith(f"{run_dir} 1 --parsable --array=0-1 --time=9 --partition=spot -A me /")
    assert rollouts.endswith("rollouts.sbatch experiment=demo rollout.replicas=2")
    said = capsys.readouterr().out
    for text in ("job 70  control", "job 72  rollouts", f"laminar top {run_dir}", "scancel 70 71 72"):
        assert text in said


def test_what_is_wrong_is_said_before_anything_is_submitted(
    sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: mistaken settings, an earlier run in the folder, options that cannot be, sbatch's own refusal:
    a line each, with the cure."""
    for words, text in (
        (["experiment=demo", "nonsense=1"], "nonsense: no such key"),
        (["experiment=demo", "reward.function=no.such"], "no.such"),
        (["experiment=demo", "--gpus-per-node=x"], "--gpus-per-node=x: a number"),
        (["experiment=demo", "--slurm='"], "quote it"),
        (["--plan", "x.yaml"], "--plan=x.yaml: not an experiment"),
        ([], "laminar submit needs"),
        (["experiment=demo", "--slurm=--partition=none"], "sbatch: sbatch: error: no such partition"),
    ):
        with pytest.raises(LaminarError, match=re.escape(text)):
            cli.run(["submit", *words])
    assert not sbatch.exists()
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/metrics.jsonl").write_text('{"kind":"start","time":1.0}\n')
    with pytest.raises(LaminarError, match="already has a run; add resume=auto"):
        cli.run(["submit", "experiment=demo"])
    monkeypatch.setattr(submit.shutil, "which", lambda name: None)
    with pytest.raises(LaminarError, match="there is no sbatch here"):
        cli.run(["submit", "experiment=demo"])


@pytest.mark.parametrize("word", ["--dry-run", "dry_run=true", "dry_run=True", "+dry_run=yes"])
def test_a_dry_run_submits_nothing(word: str, sbatch: Path, tmp_path: Path) -> None:
    """Promise: however it is written, a dry run shows the jobs and submits none."""
    assert cli.run(["submit", "experiment=demo", f"run_dir={tmp_path}/run", word]) == 0
    assert not sbatch.exists()


@pytest.mark.parametrize("command", ["submit", "launch"])
def test_a_dry_run_says_what_a_run_would_need(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: as `laminar train dry_run=true` does, beside the lines that can be typed."""
    (tmp_path / "hosts").write_text("n1\n")
    words = [f"--hosts={tmp_path}/hosts"] if command == "launch" else []
    words += ["experiment=demo", f"run_dir={tmp_path}/run", f"data.train={tmp_path}/none.jsonl"]
    assert cli.run([command, *words, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"before a run data.train={tmp_path}/none.jsonl: no such file")
    assert "before a run" not in said.out and "experiment=demo" in said.out


def test_a_live_run_is_not_submitted_once_more(sbatch: Path, tmp_path: Path) -> None:
    """Promise: its trainers would be replaced; also where its store lies on the controller's own disk."""
    words = ["submit", "experiment=demo", "run_dir=runs/a", "resume=auto", f"store_dir={tmp_path / 'local'}"]
    lock = RunLock([tmp_path / "runs/a"], print)
    try:
        with pytest.raises(LaminarError, match="is in use by a live run"):
            cli.run(words)
    finally:
        lock.release()
    assert not sbatch.exists()


def test_a_plan_is_submitted_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: --plan FILE is the experiment that `laminar plan` has written."""
    file = tmp_path / "plan" / "experiment" / "node.yaml"
    file.parent.mkdir(parents=True)
    file.write_text((FOLDER / "cluster_64gpu_32b.yaml").read_text())
    jobs = lines(capsys, "--plan", str(file), "steps=3")
    assert nodes_and_gpus(jobs["trainer"][1]) == (4, 8)
    assert jobs["trainer"][1][-3:] == [f"--config-dir={tmp_path}/plan", "experiment=node", "steps=3"]


def test_jobs_wait_until_slurm_has_started_one_again() -> None:
    """Promise (docs/promises.md#failure-domains): who waits for a job whose node has died does not give
    up before Slurm can have noticed and started it again; what the user has set counts."""
    config = RunConfig()
    shipped = (
        "AuthInfo                = (null)\nSlurmdTimeout           = 300 sec\nSlurmUser = slurm(64030)\n"
    )
    quick = "AuthInfo = socket=/run/m.sock,cred_expire=6\nSlurmdTimeout           = 6 sec\n"
    assert patience(config, [], shipped) == ["cluster.join_timeout_seconds=600"]
    assert patience(config, ["cluster.join_timeout_seconds=20"], shipped) == []
    assert patience(config, [], quick) == patience(config, [], "") == []


def test_a_span_of_replicas_begins_with_its_smallest_number():
    """Each role is a job of its own, so that replicas can come and go."""
    config = config_of((1, 1, 1), 2, 1)
    config.rollout.replicas = "2:6"
    *_, rollouts = layout(config, derive(config), 8, apart=False)
    assert rollouts.script == "rollouts.sbatch" and dict(rollouts.environment) == {"ROLLOUTS": "2"}
    assert rollouts.options == ("--array=0-0", "--gpus-per-node=2")


def test_scale_sh_submits_what_the_other_rollouts_have():
    """An element of one replica with its GPUs, the options of sbatch and the settings of the run, as words
    that the configuration takes whatever is in them; not where the user names a program."""
    config = config_of((1, 1, 1), 2, 4)
    config.rollout.replicas = "2:6"
    settings = ["experiment=demo", 'data.system_prompt=Say "it\'s" {so}, please']
    (word,) = scale_words(config, 8, ["--partition=preempt", "--comment=a b"], settings)
    loaded = load_config([*settings, "rollout.replicas=2:6", "role=controller", "dry_run=true", word])
    program, script, *words = shlex.split(loaded.cluster.scale_command)
    assert program == "bash" and Path(script).name == "scale.sh" and Path(script).is_file()
    options = ["--gpus-per-node=4", "--partition=preempt", "--comment=a b"]
    assert words == [*options, str(Path(script).with_name("rollouts.sbatch")), *settings]
    assert scale_words(config, 0, [], [])[0].endswith("rollouts.sbatch")
    config.cluster.scale_command = "/bin/true"
    assert scale_words(config, 8, [], []) == []
