"""`laminar sim` and `laminar plan`: what they print and write, and what they refuse; real lengths; presets as
the live pipelines."""

import dataclasses
import itertools
import json
import math
import shlex
import sqlite3
import subprocess
import sys

import psutil
import pytest

from helpers.paths import ROOT
from helpers.small_plans import FEW_STEPS as SMALL
from laminar_hpc.config.directories import conf_directory
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.config.system_schema import PipelineConfig
from laminar_hpc.launch import cli
from laminar_hpc.launch.cli import COMMANDS
from laminar_hpc.simulator import command
from laminar_hpc.simulator.rules import PIPELINES, Rules
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.settings import experiments, load_plan, load_simulation, questions
from laminar_hpc.simulator.workload import Workload, capped_mean, mu_of_mean, read_lengths


def test_presets_are_those_of_the_live_run():
    """The same pipeline name means the same policy values in conf/pipeline and in the simulator, in every
    field that both have; `laminar` is the preset itself, `laminar_no_repack` is without repack."""
    shared = {field.name for field in dataclasses.fields(Rules)} & {
        field.name for field in dataclasses.fields(PipelineConfig)
    }
    assert {"refresh", "max_staleness", "consumption", "repack", "keep_kv", "dispatch"} == shared
    names = [path.stem for path in sorted((conf_directory() / "pipeline").glob("*.yaml"))]
    assert len(names) >= 5
    for name in names:
        live = load_config([f"pipeline={name}"]).pipeline
        rules = PIPELINES[name]
        assert {key: getattr(rules, key) for key in shared} == {key: getattr(live, key) for key in shared}, (
            name
        )
    assert PIPELINES["laminar_no_repack"] == dataclasses.replace(PIPELINES["laminar"], repack="off")


def test_every_shipped_file_is_read():
    """Every shipped simulation and question parses."""
    assert {load_simulation(name, []).name for name in experiments()} and {
        load_plan(name, []).name for name in questions()
    }


def test_sim_writes_a_table_a_result_and_a_page(tmp_path, capsys):
    """`laminar sim` prints a table and writes result.json and the page."""
    words = [
        "repack",
        *SMALL,
        f"out_dir={tmp_path}",
        "gpus=[16,32]",
        "pipelines=[sync,stream,partial,laminar]",
        "trainer_share=0.5",
        "draws=2",
    ]
    assert cli.run(["sim", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 1 + 8 + 2
        and lines[0].split()[0] == "pipeline"
        and lines[4].split()[:2] == ["laminar", "16"]
    )
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    for row in rows:
        total = sum(sum(causes.values()) for causes in row["gpu_seconds"].values())
        assert math.isclose(total, row["gpus"] * row["step_seconds"] * 3, rel_tol=0.01), (
            "every GPU-second has a cause"
        )
    page = (tmp_path / "report.html").read_text()
    for part in ("Where each GPU-second went", "Time line", "KV use", "staleness at training", "lengths"):
        assert part in page
    assert cli.run(["sim", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows, "the same seed gives the same result"


@pytest.mark.slow
def test_the_first_example_of_the_help_is_done_within_a_minute_and_says_how_far_it_is(tmp_path):
    """In seconds of one core, so that others on the machine do not count: the first line within 5, a line for
    each of at most 15 after it, all within 60. It is what README shows, too."""
    example = next(iter(COMMANDS["sim"].examples))
    assert f"`{example}`" in (ROOT / "README.md").read_text()
    _, *words = shlex.split(example)
    program = [sys.executable, "-m", "laminar_hpc.launch.cli", *words, f"out_dir={tmp_path}"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        spent, said = [], []
        for line in process.stderr:
            times = psutil.Process(process.pid).cpu_times()
            spent.append(times.user + times.system)
            said.append(line)
        table = process.stdout.read()
    assert process.returncode == 0 and len(table.splitlines()) >= 5
    assert spent[0] < 5 and spent[-1] < 60 and len(said) >= 10
    assert all(after - before < 15 for before, after in itertools.pairwise(spent))
    assert said[-1].startswith("10/10 ")


def test_what_takes_long_says_what_it_is_trying(capsys, monkeypatch, tmp_path):
    """While a split is searched and while constants are drawn, though not every short run is told of."""
    monkeypatch.setattr(command, "_PROGRESS_SECONDS", 0.0)
    words = ["small", *SMALL, f"out_dir={tmp_path}", "gpus=[32]", "pipelines=[one_step]", "draws=2"]
    assert cli.run(["sim", *words]) == 0
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert first == "one_step on 32 GPUs, each with draws=2 short runs for its range"
    assert sum(" of 32 GPUs train: " in line for line in lines) >= 3
    assert sum(" of 2 draws for the range" in line for line in lines) == 2
    assert last.startswith("1/1 one_step on 32 GPUs: ") and " to " in last


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "usage: laminar sim EXPERIMENT"),
        (["nope"], "no simulation 'nope': there are dora, laminar, mixed"),
        (["dora", "modle=32B"], "modle"),
        (["dora", "model=33B"], "model=33B: use one of 0.5B, 1.5B"),
        (["dora", "pipelines=[async]"], "pipelines=async: use one of sync"),
        (["dora", "engine=tgi"], "engine=tgi: use one of sglang, vllm"),
        (["dora", "constants.mfu=1"], "constants=mfu: use one of"),
        (["dorra"], r"did you mean dora\?"),
        (["dora", "gpus=[4]"], "gpus=4: at least 8"),
        (["dora", "tensor_parallel=1"], "raise tensor_parallel"),
        (["dora", "warmup_steps=16"], "below steps=16"),
        (["dora", "workload.mean_response_tokens=40000"], "must lie between 1 and"),
        (["dora", "workload.lengths_file=/nowhere"], "neither a run directory"),
        (["repack", "trainer_share=1"], "a trainer share of 1 leaves no GPUs to train or to generate"),
    ],
)
def test_sim_refuses_in_one_line(words, text):
    """A wrong simulation is refused with its reason."""
    with pytest.raises(LaminarError, match=text):
        cli.run(["sim", *words])


@pytest.mark.parametrize("command", ["sim", "plan"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(command, tmp_path):
    """Promise: one line, and nothing is simulated first."""
    (tmp_path / "file").touch()
    name = "dora" if command == "sim" else "node"
    with pytest.raises(LaminarError, match=r"out_dir=.*/file/x: cannot be written \(Not a directory\)"):
        cli.run([command, name, f"out_dir={tmp_path}/file/x"])


def test_lengths_of_a_run_are_replayed(tmp_path):
    """A run's own store, group by group; environment turns do not change the tokens."""
    database = sqlite3.connect(tmp_path / "store.sqlite")
    database.execute(
        "CREATE TABLE trajectories(id INTEGER, group_id INTEGER, state TEXT, response_length INTEGER)"
    )
    rows = [(1, 7, "consumed", 5), (2, 7, "finished", 9), (3, 8, "consumed", 11), (4, 8, "granted", 99)]
    database.executemany("INSERT INTO trajectories VALUES (?, ?, ?, ?)", rows)
    database.commit()
    assert read_lengths(tmp_path) == [[5, 9], [11]]
    work = Workload(WorkloadConfig(samples_per_prompt=3, lengths_file=str(tmp_path), turns=4), 0, 10)
    assert work.lengths(0) == [5, 9, 5] and work.lengths(3) == [11, 11, 11]
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"store_dir: {tmp_path / 'disk'}\n")
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "store.sqlite").rename(tmp_path / "disk" / "run" / "store.sqlite")
    assert read_lengths(run) == [[5, 9], [11]], "where its store_dir is"
    draw = work.group(0)
    assert [sum(turns) for turns in draw.turns] == [5, 9, 5]
    assert all(len(course.took) == len(course.drawn) - 1 for course in draw.courses)


def test_drawn_lengths_have_the_mean_and_resemble_each_other_in_a_group():
    """Drawn lengths have the mean asked for; half of the variance of their logs is between groups."""
    c = WorkloadConfig(mean_response_tokens=2246, max_response_tokens=30720, sigma=1.69)
    assert math.isclose(capped_mean(mu_of_mean(2246, 1.69, 30720), 1.69, 30720), 2246, rel_tol=1e-6)
    work = Workload(c, 3, 1)
    groups = [work.lengths(i) for i in range(2048)]
    mean = sum(map(sum, groups)) / (2048 * 16)
    assert abs(mean / 2246 - 1) < 0.08 and max(map(max, groups)) == 30720
    logs = [[math.log(n) for n in group] for group in groups]
    centre = sum(map(sum, logs)) / (2048 * 16)
    between = sum((sum(row) / 16 - centre) ** 2 for row in logs) / 2048
    assert abs(between / 1.69**2 - (0.5 + 0.5 / 16)) < 0.1, (
        "half of the variance of the logs is between groups"
    )


@pytest.mark.parametrize("line", ["[5, Infinity]", "[1e999]", "[NaN]", "[[5]]", "5", "[]"])
def test_lengths_that_are_none_are_refused(line, tmp_path):
    """Promise: one line, whatever the file has."""
    (tmp_path / "lengths.jsonl").write_text(f"{line}\n")
    with pytest.raises(LaminarError, match=r"workload\.lengths_file=.*lengths\.jsonl: n"):
        read_lengths(tmp_path / "lengths.jsonl")
