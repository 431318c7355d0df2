"""What users of other systems trip over at their first run, and what they read here instead: one line with
what, where and the cure.

The parts that need a model, an engine or a cluster are tested where those are: tests/trainer (a wrong
config.json, memory of the entropy), tests/rollout (cache per weight id, log-probs at the sampling
temperature), tests/slurm, tests/packaging.
"""

import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.paths import ROOT
from laminar_hpc import __main__ as rank_main
from laminar_hpc.config.check import check, pipeline_text
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.config.models import model_config
from laminar_hpc.controller.trajectories.evaluations import Evaluations
from laminar_hpc.controller.weights.probes import Probes
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.launch import cli
from laminar_hpc.launch.doctor import packages
from laminar_hpc.machine.processes import oom_kills


def dry_run(capsys, *words: str) -> str:
    assert cli.run(["train", "experiment=demo", "dry_run=true", *words]) == 0
    return capsys.readouterr().out


# ---- first run ---------------------------------------------------------------------------------------------


def test_the_first_run_needs_no_overrides(capsys):
    """The quickstart is one command on shipped files, and says what it will do before it does it."""
    printed = dry_run(capsys)
    assert "parameters" in printed and "before a run" not in printed, "nothing is missing for it"


def test_is_it_really_asynchronous(capsys):
    """Nobody has to read the code to know: the dry run and the first lines of a run say it, for each
    pipeline."""
    assert "asynchronous; trainer and replicas work at the same time" in dry_run(
        capsys
    ) and "at most 2 steps stale" in pipeline_text(load_config([]))
    assert "sync: synchronous; trainer and replicas take turns, on-policy" in dry_run(capsys, "pipeline=sync")
    assert "staleness without a bound" in dry_run(capsys, "pipeline.max_staleness=null")


def test_one_meaning_of_batch(capsys):
    """No five batch sizes: prompts x samples make a step, updates share it, one token budget packs it; and
    that is printed."""
    keys = (ROOT / "tests/config/keys.txt").read_text().split()
    assert [key for key in keys if "batch" in key] == [
        "algorithm.minibatches_per_step",
        "cluster.batch_timeout_seconds",
        "pipeline.local_batch_groups",
        "trainer.tokens_per_microbatch",
    ]
    words = [
        "algorithm.prompts_per_step=48",
        "algorithm.samples_per_prompt=4",
        "algorithm.minibatches_per_step=3",
    ]
    assert "48 prompts x 4 samples = 192 trajectories; 3 updates of 64 each" in dry_run(capsys, *words)
    with pytest.raises(
        LaminarError,
        match=r"48 x algorithm.samples_per_prompt=4 = 192 trajectories do not divide into .*=5 .*change one",
    ):
        check(load_config(["experiment=demo", *words[:2], "algorithm.minibatches_per_step=5"]))


# ---- models and checkpoints --------------------------------------------------------------------------------


def test_no_conversion_of_checkpoints(tmp_path, monkeypatch):
    """A Hugging Face directory goes in and comes out; who names another folder is told what to write."""
    (tmp_path / "step_000040" / "hf").mkdir(parents=True)
    (tmp_path / "step_000040" / "hf" / "config.json").write_text("{}")
    with pytest.raises(
        LaminarError, match=f"its Hugging Face directory is model.path={tmp_path}/step_000040/hf"
    ):
        model_config(str(tmp_path / "step_000040"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(LaminarError, match="there is a folder models/ here, it was taken for a path"):
        model_config("models/other")
    with pytest.raises(LaminarError, match="name a Hugging Face model directory"):
        model_config("/nowhere/else/model")


def test_a_model_of_another_family_is_refused_by_name(tmp_path):
    """There is no model script to choose wrongly: the architecture is read, and one that is not supported is
    named with those that are."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(
        LaminarError, match=r"MambaForCausalLM is not supported; supported: .*Qwen2ForCausalLM"
    ):
        check(load_config(["experiment=demo", f"model.path={tmp_path}"]))


# ---- environment -------------------------------------------------------------------------------------------


def test_versions_that_do_not_fit_are_named_with_the_cure(monkeypatch):
    """Every package has one exact pin, and `laminar doctor` names what is installed instead of it."""
    real = packages.installed
    monkeypatch.setattr(packages, "installed", lambda name: "0.1.0" if name == "transformers" else real(name))
    line = next(str(finding) for finding in packages.CHECKS.findings() if finding.what == "transformers")
    assert line.startswith("warn") and "0.1.0" in line and "tested with" in line and "make setup" in line


@pytest.mark.parametrize("package", ["sglang", "megatron-core"])
def test_nothing_is_patched(package):
    """No patched image to build: every Python file of SGLang and Megatron-core is the published one, by the
    wheel's own hashes."""
    distribution = importlib.metadata.distribution(package)
    rows = [
        row
        for row in csv.reader((distribution.read_text("RECORD") or "").splitlines())
        if row[0].endswith(".py") and row[1]
    ]
    assert len(rows) > 100
    changed = []
    for name, digest, _ in rows:
        kind, _, expected = digest.partition("=")
        found = hashlib.new(kind, Path(str(distribution.locate_file(name))).read_bytes()).digest()
        if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != expected:
            changed.append(name)
    assert not changed


def test_no_ray():
    """Slurm or torchrun start a run as they are: nothing of Ray is required, and the job script is one file
    that a shell can read."""
    pins = "".join(path.read_text() for path in (ROOT / "requirements").glob("*.txt"))
    assert not [line for line in pins.splitlines() if line.split("==")[0] == "ray"]
    script = ROOT / "slurm" / "laminar_single.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("environment", "cause"),
    [({}, "torchrun did not start"), ({"SLURM_PROCID": "3"}, "srun started this process without")],
)
def test_started_without_torchrun(environment, cause):
    """torchrun or srun? A process that is started by neither `laminar train` nor torchrun is told so, instead
    of being rank 0 of one."""
    clean = {
        key: value for key, value in os.environ.items() if key != "RANK" and not key.startswith("SLURM_")
    }
    command = [sys.executable, "-m", "laminar_hpc", "experiment=demo"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**clean, **environment}
    )
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1
    assert lines[0].startswith(f"laminar: error: {cause}") and "slurm/laminar_single.sbatch" in lines[0]


def test_the_head_node_is_asked_of_slurm():
    """The rendezvous is at the first node of the allocation, not at the login node, which
    SLURM_LAUNCH_NODE_IPADDR names."""
    script = (ROOT / "slurm" / "common.sh").read_text()
    assert 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST")' in script and "${head%%" in script
    assert not [path for path in (ROOT / "slurm").iterdir() if "SLURM_LAUNCH_NODE_IPADDR" in path.read_text()]


# ---- memory ------------------------------------------------------------------------------------------------


def test_memory_is_estimated_before_and_named_after(capsys, tmp_path):
    """The dry run estimates memory per GPU; a process that the kernel killed for want of it is told from one
    that crashed."""
    printed = dry_run(capsys)
    assert "trainer gpu memory" in printed and "rollout gpu memory" in printed and "slot size" in printed
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\n")
    assert oom_kills(tmp_path / "memory.events") == 1 and oom_kills(tmp_path / "absent") == 0
    OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})
    assert (
        "lower trainer.tokens_per_microbatch" in rank_main.cure(OutOfMemoryError("CUDA out of memory"))
        and rank_main.cure(ValueError()) == ""
    )


# ---- log-probs and evaluation ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_and_trainer_that_differ_are_noticed(dtype):
    """Each weight id is scored by both sides on a fixed probe: the mismatch is recorded, and beyond rounding
    a warning says where to look."""
    said, written = [], []
    metrics = SimpleNamespace(write=lambda kind, **fields: written.append((kind, fields)))
    probes = Probes(dtype, 3, metrics, said.append)
    small, large = {"float32": (1e-5, 0.01), "bfloat16": (0.003, 0.06)}[dtype]
    for weight_id, mismatch in enumerate((small, large), 1):
        probes.scored(weight_id, weight_id, "rollout0", [-1.0 + mismatch, -2.0 - mismatch])
        probes.scored(weight_id, weight_id, "trainer", [-1.0, -2.0])
    assert [round(fields["mean"], 6) for _, fields in written] == [small, large] and written[0][
        0
    ] == "logprob_mismatch"
    assert (
        len(said) == 1
        and "log-prob mismatch of rollout0 at weight id 2" in said[0]
        and "rollout.engine_arguments" in said[0]
    )


def test_an_adapter_that_one_side_ignores_ends_the_run():
    """Promise: where the trainer's adapter has moved the log-probs beyond rounding, an engine that is where
    the model alone is, or half-way, ends the run in one line; one that follows does not, nor one whose
    adapter does little yet."""
    metrics = SimpleNamespace(write=lambda kind, **fields: None)
    probes = Probes("float32", 3, metrics, lambda line: None)
    probes.without("rollout0", [-1.0, -2.0])
    for weight_id, (engine, trainer) in enumerate(((-1.0, -1.003), (-1.09, -1.1))):
        probes.scored(weight_id, weight_id, "trainer", [trainer, trainer - 1])
        probes.scored(weight_id, weight_id, "rollout0", [engine, engine - 1])
    probes.scored(7, 7, "rollout0", [-1.04, -2.04])
    with pytest.raises(LaminarError, match="weight id 7 does not act in rollout0 as in the trainer"):
        probes.scored(7, 7, "trainer", [-1.1, -2.1])


def test_evaluation_beside_asynchronous_training():
    """An evaluation runs while training goes on: whoever is idle takes a part, all parts with one weight id,
    outside admission."""
    evaluations = Evaluations({"heldout": [Prompt(f"{i}", [i], {}) for i in range(6)]}, 0, 1.0, 32)
    evaluations.add("step", 4, 2)
    assert evaluations.grant(0, 3, 3, 0, 0.0) is None, (
        "weights of step 3 are older than the step that is evaluated"
    )
    first = evaluations.grant(0, 7, 5, 1, 0.0)
    assert (
        first is not None and first.weight_id == 7 and {group.group_id for group in first.groups} == {-1}
    ), "no group of the buffer"
    assert evaluations.grant(1, 8, 6, 2, 0.0) is None, "a replica on newer weights gets training work instead"
    second = evaluations.grant(2, 7, 5, 3, 0.0)
    assert (
        second is not None
        and len(first.groups) + len(second.groups) == 6
        and second.evaluation == first.evaluation
    )
