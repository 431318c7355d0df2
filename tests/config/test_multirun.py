"""`--multirun`: combinations by Hydra's grammar, one run each on this machine or as a Slurm job."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.load import keys_of, load_config
from laminar_hpc.launch import cli, multirun
from laminar_hpc.launch.multirun import alternatives, combinations, run_here, submit
from laminar_hpc.machine.processes import process_is_alive


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("seed=1,2", ["seed=1", "seed=2"]),
        ("seed=range(1,4)", ["seed=1", "seed=2", "seed=3"]),
        ("steps=choice(5,3)", ["steps=5", "steps=3"]),
        ("steps=sort(5,3)", ["steps=3", "steps=5"]),
        ("steps=int(3)", ["steps=int(3)"]),
        ("optimizer.lr=1e-5,3e-5", ["optimizer.lr=1e-05", "optimizer.lr=3e-05"]),
        ("pipeline=glob(s*)", ["pipeline=stream", "pipeline=sync"]),
        ("data.shuffle=true,false", ["data.shuffle=true", "data.shuffle=false"]),
        ("pipeline.max_staleness=1,null", ["pipeline.max_staleness=1", "pipeline.max_staleness=null"]),
        ("data.train=/a/b.jsonl,'/c/d,e.jsonl'", ["data.train=/a/b.jsonl", "data.train=/c/d,e.jsonl"]),
        ("evaluation.files=[a],[b,c]", ["evaluation.files=[a]", "evaluation.files=[b,c]"]),
        ("run_dir=/a b(1)", ["run_dir=/a b(1)"]),
        ("~rollout.engine_arguments", ["~rollout.engine_arguments"]),
    ],
)
def test_values_are_read_by_hydras_grammar(word, values):
    """A sweep is what Hydra says it is; a word that Hydra cannot read is a text and stands as it is."""
    assert alternatives(word, keys_of()) == values


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("optimizer.lr=interval(0,1)", r"its values cannot be listed; write optimizer.lr=choice\(A,B\)"),
        ("pipeline=glob(x*)", "no such file; glob is for experiment, pipeline"),
    ],
)
def test_what_cannot_be_counted_is_refused(word, text):
    """An endless or empty set of values is named before anything starts."""
    with pytest.raises(LaminarError, match=text):
        alternatives(word, keys_of())


def test_every_combination_has_its_own_folder():
    """All combinations, the last word fastest, each in a folder named after what differs; doubles once."""
    made = combinations(
        ["experiment=demo", "seed=1,2,1", "pipeline=sync,laminar", "run_dir=r/x"], load_config
    )
    assert [each.label for each in made] == [
        f"seed={s},pipeline={p}" for s in (1, 2) for p in ("sync", "laminar")
    ]
    assert [str(each.run_dir) for each in made] == [f"r/x-multirun/{each.label}" for each in made]
    assert made[0].all_words[-1] == "run_dir=r/x-multirun/seed=1,pipeline=sync"
    (one,) = combinations(["experiment=demo"], load_config)
    assert one.label == "(one)" and str(one.run_dir) == "runs/demo-multirun/one"
    alike = combinations(["experiment=demo", "data.answer_field='a b','a?b'"], load_config)
    assert len({each.run_dir for each in alike}) == 2
    long = combinations(["experiment=demo", f"data.answer_field={'x' * 300},{'x' * 299}"], load_config)
    assert len({each.run_dir for each in long}) == 2 and max(len(each.run_dir.name) for each in long) < 128


def test_wrong_combinations_are_refused_together():
    """What is wrong in any combination is said before the first one begins, each line once."""
    with pytest.raises(Refused) as error:
        combinations(["experiment=demo", "steps=0,1,x", "seed=1,2"], load_config)
    lines = str(error.value).splitlines()
    assert (
        len(lines) == 2 and lines[0].startswith("steps=0: must be") and lines[1].startswith("steps=x: must")
    )
    with pytest.raises(LaminarError, match="run_dir: name one folder"):
        cli.run(["train", "--multirun", "experiment=demo", "run_dir=a,b"])


@pytest.fixture
def program(tmp_path, monkeypatch):
    """In place of python: writes down its words and a summary, and fails for seed=2."""
    path = tmp_path / "python"
    path.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/words\n'
        'for word; do :; done; run=${word#run_dir=}; mkdir -p "$run"\n'
        'case "$*" in *seed=2*) exit 1;; esac\n'
        'echo \'{"steps": 3, "accuracy_before": 0.1, "accuracy_after": 0.9, "tokens_per_second": 5000}\''
        ' > "$run/summary.json"\n'
    )
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    return tmp_path


@pytest.fixture(autouse=True)
def own_signals():
    """`run_here` is a command's whole life and leaves its handlers behind."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_runs_follow_each_other_and_a_failure_shows(program, capfd):
    """A run that fails does not keep the others from running; the exit code shows that one did."""
    made = combinations(["experiment=demo", "seed=1,2,3", f"run_dir={program}/r"], load_config)
    assert run_here(made) == 1
    calls = (program / "words").read_text().splitlines()
    assert [f"seed={seed}" in call for seed, call in enumerate(calls, 1)] == [True] * 3
    assert all(call.startswith("-m laminar_hpc.launch.cli train experiment=demo") for call in calls)
    header, *rows = [line.split() for line in capfd.readouterr().out.splitlines()][-4:]
    assert header[:5] == ["combination", "exit", "steps", "before", "after"]
    assert [row[:5] for row in rows] == [
        ["seed=1", "0", "3", "0.100", "0.900"],
        ["seed=2", "1", "-", "-", "-"],
        ["seed=3", "0", "3", "0.100", "0.900"],
    ]


def test_a_signal_ends_the_run_that_goes_on_and_begins_no_other(program, capfd, monkeypatch):
    """A signal is handed on to the run, whose end is awaited; what follows shows as not begun."""
    (program / "python").write_text(
        f"#!/bin/sh\ntrap 'exit 0' USR1\nkill -USR1 $PPID\n"
        f"while [ ! -e {program}/never ]; do sleep 0.05; done\n"
    )
    made = combinations(["experiment=demo", "seed=1,2", f"run_dir={program}/r"], load_config)
    begin = time.monotonic()
    assert run_here(made) == 0 and time.monotonic() - begin < 60
    rows = [line.split()[:2] for line in capfd.readouterr().out.splitlines()][-2:]
    assert rows == [["seed=1", "0"], ["seed=2", "-"]]


PYTHON = sys.executable
ALONE = """
import sys
from pathlib import Path
from laminar_hpc.launch.multirun import Combination, run_here
sys.executable = sys.argv[1]
run_here([Combination("one", ("experiment=demo",), Path("r"))])
"""


def test_a_run_does_not_outlive_its_multirun(program):
    """Children die with their parent, also when that is killed."""
    lines = ("#!/bin/sh", f"echo $$ > {program}/new", f"mv {program}/new {program}/pid", "exec sleep 300")
    (program / "python").write_text("\n".join(lines))
    every = subprocess.Popen([PYTHON, "-c", ALONE, str(program / "python")], cwd=program)
    until = time.monotonic() + 60
    while not (program / "pid").exists():
        assert every.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    every.kill()
    every.wait()
    pid = int((program / "pid").read_text())
    try:
        while process_is_alive(pid):
            assert time.monotonic() < until, "it goes on alone"
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_each_combination_is_a_slurm_job(tmp_path, monkeypatch, capsys):
    """sbatch gets our script, the words, its own options and the run's folder; each job's id is printed."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        "#!/bin/sh\nfor word; do :; done\n"
        'if [ "$word" = seed=3 ]; then echo "sbatch: error: no such partition" >&2; exit 1; fi\n'
        f'echo "$RUN_DIR $VENV $*" >> {tmp_path}/calls\necho "7${{word#seed=}};cluster"\n'
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VENV", raising=False)
    words = ["train", "-m", "--slurm=--nodes=2 -p gpu", "experiment=demo", "run_dir=runs/demo", "seed=1,2"]
    assert cli.run(words) == 0
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first.startswith(
        f"{tmp_path}/runs/demo-multirun/seed=1 {sys.prefix} --parsable --nodes=2 -p gpu /"
    )
    assert first.endswith("slurm/laminar_single.sbatch experiment=demo seed=1") and second.endswith("seed=2")
    shown = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert shown == [["submitted", "job", "71", "seed=1"], ["submitted", "job", "72", "seed=2"]]
    with pytest.raises(
        LaminarError, match="seed=3: sbatch: error: no such partition; 1 jobs before it are submitted"
    ):
        submit(combinations(["experiment=demo", "seed=2,3"], load_config), "")
    with pytest.raises(
        LaminarError, match="--slurm=--comment='x: No closing quotation; quote it as in a shell"
    ):
        submit(combinations(["experiment=demo", "seed=2,3"], load_config), "--comment='x")
    monkeypatch.setattr(multirun, "run_here", len)
    assert cli.run([*words, "dry_run=true"]) == 2  # shown here
    monkeypatch.setattr(multirun.shutil, "which", lambda name: None)
    with pytest.raises(LaminarError, match="there is no sbatch here"):
        submit([], "")


def test_the_table_reads_what_the_runs_wrote(tmp_path):
    """Figures are those of each run's own summary.json."""
    made = combinations(["experiment=demo", f"run_dir={tmp_path}/r"], load_config)
    made[0].run_dir.mkdir(parents=True)
    (made[0].run_dir / "summary.json").write_text(json.dumps({"steps": 12, "tokens_per_second": 6100}))
    _, row = multirun.table(made, {made[0]: (0, 92.0)})
    assert row.split()[:7] == ["(one)", "0", "12", "-", "-", "6.1k", "1m32s"]
