"""rollout.replicas=MIN:MAX on a real Slurm, by slurm/scale.sh as `laminar submit` sets it up."""

import json
import shlex
import sys
from pathlib import Path

import psutil
import pytest

from helpers.paths import ROOT
from helpers.runs import assert_clean, steps_done
from laminar_hpc.machine.files import jsonl

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]
RUN_SECONDS = 400
# one slow request at a time: the trainer, also of a busy machine, waits until there are three replicas
RUN = [
    *("experiment=demo", "rollout.engine=emulated", "rollout.max_concurrent=1", "emulation.time_scale=1.5"),
    *("rollout.replicas=1:3", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2"),
    *("sampling.max_response_tokens=48", "evaluation.problems=8", "steps=2000", "checkpoint.every=1000"),
    *("cluster.join_timeout_seconds=60", "rollout.engine_start_seconds=10"),
]
ON_N1 = "--nodelist=n1 --oversubscribe --cpus-per-task=1"


class ScaledRun:
    """Its jobs; controller and trainer are on n1, the rollouts have `options`."""

    def __init__(self, cluster, run_dir: Path, options: str, *words: str) -> None:
        self.cluster, self.run_dir = cluster, run_dir
        command = [
            sys.executable,
            "-m",
            "laminar_hpc.launch.cli",
            "submit",
            *RUN,
            *words,
            f"run_dir={run_dir}",
        ]
        places = [f"--controller={ON_N1}", f"--trainer={ON_N1}", f"--rollouts={options}"]
        every = f"--slurm=--time=60 --mem=500 --output={cluster.folder}/%A.out"
        environment = {"OMP_NUM_THREADS": "1", "STORE_DIR": str(run_dir.parent / "store")}
        said = cluster.command(*command, "--apart", every, *places, seconds=120, **environment)
        lines = [line.split() for line in said.splitlines() if line.startswith("submitted")]
        self.jobs = {name: job for _, _, job, name in lines}

    def elements(self, state: str = "all") -> list[str]:
        """Of rollouts, in the queue or on nodes."""
        words = ["squeue", "-h", "-r", "-t", "PD,R" if state == "all" else state, "-n", "laminar-rollouts"]
        return sorted(self.cluster.command(*words, "-o", "%i").split())

    def said(self, text: str) -> list[str]:
        """Lines of the controller that begin with it."""
        lines = self.cluster.output(self.jobs["control"]).splitlines()
        return [line for line in lines if line.startswith(text)]

    def grown(self) -> list[int]:
        """Replicas before the first measured gain, and after each."""
        gains = list(jsonl.read(self.run_dir / "metrics.jsonl", "scaled"))
        return [each["before"] for each in gains[:1]] + [each["replicas"] for each in gains]

    def wait(self, condition, what: str, seconds: float = RUN_SECONDS):
        return self.cluster.poll(condition, seconds, what, self.jobs["control"])

    def stops(self) -> None:
        """`laminar stop`: all jobs end, nothing is left in the queue or on a node, and the audit is clean."""
        stop = [sys.executable, "-m", "laminar_hpc.launch.cli", "stop", str(self.run_dir)]
        self.cluster.command(*stop, seconds=60)
        self.wait(lambda: not self.cluster.command("squeue", "-h"), "the end of all jobs", 120)
        for name in ("control", "trainer"):
            assert self.cluster.state(self.jobs[name]) == "COMPLETED"
        assert not [line for line in processes() if str(self.run_dir) in line]
        assert_clean(self.run_dir)


def processes() -> list[str]:
    found = psutil.process_iter(["cmdline"])
    return [shlex.join(each.info["cmdline"] or []) for each in found]


def test_a_run_grows_and_outlives_the_loss_of_its_replicas(slurm_cluster, tmp_path: Path) -> None:
    """It asks for two elements more, which Slurm starts, and which share the relay of the first. The power
    of their node is cut: all are back in the queue, and however long they wait there no more are submitted.
    With their node they come back, and steps go on."""
    if slurm_cluster.mode() == "plain":
        pytest.skip("nodes without namespaces of their own cannot lose power: that needs CAP_SYS_ADMIN")
    run = ScaledRun(slurm_cluster, tmp_path / "run", "--nodelist=n2 --oversubscribe --cpus-per-task=1")
    run.wait(lambda: len(run.elements("R")) == 3, "two elements more")
    run.wait(lambda: run.grown()[-1:] == [3], "the gain of three measured")
    assert run.grown()[0] == 1
    assert not [line for line in run.said("relay ") if "failed" in line]
    elements = run.elements()
    slurm_cluster.node("off", "n2")
    try:
        on_their_way = "replicas     3 are on their way, 3 of them waiting for a machine: none started"
        run.wait(lambda: len(run.said(on_their_way)) >= 2, "two questions for them")
        assert run.elements() == run.elements("PD") == elements
    finally:
        slurm_cluster.node("on", "n2")
    before = steps_done(run.run_dir)
    run.wait(lambda: run.elements("R") == elements, "the elements on their node")
    run.wait(lambda: steps_done(run.run_dir) >= before + 5, "steps with them")
    assert run.elements() == elements
    run.stops()


def test_a_refusal_is_one_line_and_who_waits_at_the_end_is_cancelled(slurm_cluster, tmp_path: Path) -> None:
    """The first call is refused by Slurm: said in one line, and the run goes on. The next one is accepted,
    and its elements wait in the queue for a node that is taken; `laminar stop` ends them too."""
    program, told = tmp_path / "scale", tmp_path / "told"
    rollouts = ROOT / "slurm/rollouts.sbatch"
    program.write_text(
        "#!/bin/bash\npartition=none\n"
        f"[ ! -e {told} ] || partition=batch\n[ $1 != start ] || touch {told}\n"
        f"exec bash {ROOT}/slurm/scale.sh --partition=$partition --exclusive --nodelist=n2 --time=60 "
        f'{rollouts} {shlex.join(RUN)} "$@"\n'
    )
    program.chmod(0o700)
    run = ScaledRun(
        slurm_cluster, tmp_path / "run", "--exclusive --nodelist=n2", f"cluster.scale_command={program}"
    )
    run.wait(lambda: len(run.elements()) == 3, "elements in the queue")
    (refused,) = run.said("replicas     cluster.scale_command start 2")
    assert "has ended with exit code 1: sbatch: error:" in refused and "partition" in refused
    (failed,) = jsonl.read(run.run_dir / "metrics.jsonl", "scale_failed")
    assert failed["replicas"] == 2
    run.wait(lambda: (len(run.elements("PD")), len(run.elements("R"))) == (2, 1), "one of them on its node")
    before = steps_done(run.run_dir)
    run.wait(lambda: steps_done(run.run_dir) >= before + 3, "steps meanwhile")
    run.stops()
    assert json.loads((run.run_dir / "summary.json").read_text())["steps"] < 2000


def test_replicas_without_work_are_let_go_and_their_elements_end(slurm_cluster, tmp_path: Path) -> None:
    """Three elements, one of which is enough for a trainer that never waits: others get Release and leave
    with nothing in hand, and their elements are cancelled."""
    fast = ["rollout.max_concurrent=64", "emulation.time_scale=40", "rollout.replicas=1:3"]
    run = ScaledRun(slurm_cluster, tmp_path / "run", "--oversubscribe --cpus-per-task=1 --array=0-2", *fast)
    run.wait(lambda: len(run.elements("R")) == 3, "three elements")
    run.wait(lambda: run.said("replicas     3 ->"), "a decision")
    run.wait(lambda: len(run.elements()) < 3, "the end of an element")
    assert [line for line in run.said("replicas     rollout") if line.endswith("is let go")]
    before = steps_done(run.run_dir)
    run.wait(lambda: steps_done(run.run_dir) >= before + 3, "steps without it")
    run.stops()
