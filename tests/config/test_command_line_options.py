"""Hydra's habits on our command line: `--cfg`, `--info`, casts, `~key`, completion in bash, and every
command's help."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.launch import cli
from laminar_hpc.launch.completion import candidates


def printed(capsys, *words: str) -> str:
    assert cli.run(list(words)) == 0
    return capsys.readouterr().out


def taken(*words: str) -> tuple:
    options = cli.COMMANDS["train"].parse("train", words)
    return options.cfg, options.info, options.multirun, options.slurm, options.words


def test_options_in_either_spelling_anywhere():
    """An option stands before, between or behind the words; all else is left as it is."""
    for words in (["--cfg", "job", "a=1", "b"], ["a=1", "--cfg=job", "b"], ["a=1", "b", "-c", "job"]):
        assert taken(*words) == ("job", None, False, None, ["a=1", "b"])
    assert taken("--info", "a=1") == (None, "all", False, None, ["a=1"])
    assert taken("a=1", "--info", "defaults") == (None, "defaults", False, None, ["a=1"])
    assert taken("-m", "--slurm=--nodes=2 -p gpu") == (None, None, True, "--nodes=2 -p gpu", [])
    assert taken("--slurm", "a=1", "--config-dir", "x")[3:] == ("", ["a=1", "--config-dir=x"])
    assert taken("--steps=3", "-x", "8") == (None, None, False, None, ["--steps=3", "-x", "8"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--cfg"], "--cfg/-c: expected one argument; usage: .*--cfg job.hydra.all"),
        (["--cfg=jobs"], "--cfg/-c: invalid choice: 'jobs' .*'job', 'hydra', 'all'"),
        (["--info=default"], "--info/-i: invalid choice: 'default' .*'defaults'"),
        (["--slurm", "experiment=demo"], "--slurm submits the jobs of --multirun: add it"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(words, text):
    """The line says which values an option has."""
    with pytest.raises(LaminarError, match=text):
        cli.run(["train", *words])


def test_cfg_prints_what_the_words_compose_to(capsys):
    """`job` is the configuration of the run, `hydra` Hydra's own settings, `all` both; nothing starts."""
    job = yaml.safe_load(printed(capsys, "train", "experiment=demo", "steps=7", "--cfg", "job"))
    assert (job["steps"], job["optimizer"]["lr"], job["pipeline"]["name"]) == (7, 1e-4, "laminar")
    hydra = yaml.safe_load(printed(capsys, "train", "--cfg=hydra"))
    assert set(hydra) == {"hydra"}
    both = yaml.safe_load(printed(capsys, "train", "experiment=demo", "--cfg=all", "steps=7"))
    assert both == {**both, **job} and "hydra" in both


def test_info_says_where_it_comes_from(capsys, tmp_path):
    """The search path names conf/ and the folder of --config-dir; the tree names the files."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nsteps: 7\n")
    words = ["train", "--config-dir", str(tmp_path), "experiment=mine"]
    path = printed(capsys, *words, "--info", "searchpath")
    assert "/conf" in path and str(tmp_path) in path
    assert "experiment: mine" in printed(capsys, *words, "--info", "defaults-tree")
    assert yaml.safe_load(printed(capsys, *words, "--info=config"))["steps"] == 7
    with pytest.raises(LaminarError, match="stepz: no such key"):
        cli.run(["train", "stepz=1", "--cfg", "job"])


def test_casts_are_hydras():
    """A cast of a number, true or false is Hydra's; a text stands as it is, cast or not."""
    config = load_config(
        ["steps=int(3.7)", "optimizer.lr=float('1e-3')", "data.shuffle=bool(0)", "run_dir=str(3)"]
    )
    assert (config.steps, config.optimizer.lr, config.data.shuffle, config.run_dir) == (
        3,
        1e-3,
        False,
        "str(3)",
    )
    with pytest.raises(LaminarError, match=r"steps=.*: must be a whole number"):
        load_config(["steps=float(2.5)"])


def test_an_entry_is_taken_out_of_a_table(tmp_path):
    """`~TABLE.NAME` removes what a file put there, `~TABLE` all of it; what is not there is named."""
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nrollout: {engine_arguments: {a: '1', b: '2'}}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    words = ["--config-dir", str(tmp_path), "experiment=mine"]
    arguments = "rollout.engine_arguments"
    assert load_config([*words, f"~{arguments}.a"]).rollout.engine_arguments == {"b": "2"}
    assert load_config([*words, f"~{arguments}", f"{arguments}.c=3"]).rollout.engine_arguments == {"c": "3"}
    with pytest.raises(LaminarError, match=rf"~{arguments}.x: {arguments} has a, b; leave it out"):
        load_config([*words, f"~{arguments}.x"])


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("~trainer.devices", "a setting cannot be removed; leave it out; write trainer.devices=null"),
        ("~experiment", "a group cannot be removed; leave it out, or write experiment=NAME"),
        ("~rollout.engine_arguments.a=1", "write ~rollout.engine_arguments.a without a value"),
        ("steps=1,2", "several values, one run each, need laminar train --multirun"),
        ("steps=range(1,4)", "several values, one run each, need laminar train --multirun"),
        ("pipeline=choice(sync,laminar)", "need laminar train --multirun"),
        (
            "algorithm.loss=clip,gspo",
            "use one of clip, gspo, cispo, aipo, dppo, sapo, gmpo, or MODULE.FUNCTION; several values",
        ),
        ("hydra.run.dir=x", "Hydra's own settings are not taken; a run writes to run_dir alone"),
        ("hydra/launcher=submitit_slurm", "Hydra's own settings are not taken"),
    ],
)
def test_what_hydra_has_and_we_do_not(word, text):
    """What a Hydra user writes and cannot mean here is answered with what to write."""
    with pytest.raises(LaminarError) as error:
        load_config(["experiment=demo", word])
    (line,) = str(error.value).splitlines()
    assert text in line


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_helps_with_examples_that_are_taken(name, capsys):
    """Each example of a command's help is a command line that its own check accepts."""
    page = printed(capsys, name, "--help")
    examples = [line for line in page.splitlines() if line.startswith(f"  laminar {name}")]
    assert len(examples) == len(cli.COMMANDS[name].examples) >= 1
    for words in cli.COMMANDS[name].examples:
        assert words in page
        cli.COMMANDS[name].parse(name, shlex.split(words)[2:])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("laminar tr", ["train "]),
        ("laminar train --mu", ["--multirun "]),
        ("laminar train --cfg ", ["job ", "hydra ", "all "]),
        ("laminar train exp", ["experiment="]),
        ("laminar train experiment=de", ["experiment=demo "]),
        ("laminar train -m pipeline=sync,par", ["pipeline=sync,partial "]),
        ("laminar train tra", ["trainer."]),
        ("laminar train optimizer.b", ["optimizer.beta1=", "optimizer.beta2="]),
        ("laminar train steps=3 algorithm.loss=c", ["algorithm.loss=clip ", "algorithm.loss=cispo "]),
        ("laminar train data.shuffle=", ["data.shuffle=true ", "data.shuffle=false "]),
        ("laminar train data.train=", []),
        ("laminar sim d", ["dora "]),
        ("laminar sim dora ste", ["steps="]),
        ("laminar top ", []),
    ],
)
def test_candidates_for_completion(line, expected):
    """Commands, options, keys level by level, and the values of a choice; files where there are none."""
    assert candidates(line, cli.COMMANDS) == expected


def test_bash_completes(tmp_path):
    """The script that bash evaluates hands the line to the installed command and takes its candidates."""
    (tmp_path / "laminar").write_text(f'#!/bin/sh\nexec {sys.executable} -m laminar_hpc.launch.cli "$@"\n')
    (tmp_path / "laminar").chmod(0o755)
    asks = (
        'eval "$(laminar --completion bash)"; COMP_LINE="$1" COMP_POINT=${#1}; _laminar; '
        'printf "%s|" "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(Path(cli.__file__).parents[1])
    for line, expected in (
        ("laminar train pipeline=s", "stream |sync |"),
        ("laminar train optimizer.l", "optimizer.lr=|"),
    ):
        done = subprocess.run(
            ["bash", "-c", asks, "bash", line],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout == expected, done.stderr
    with pytest.raises(LaminarError, match="only bash"):
        cli.run(["--completion", "fish"])
