"""launch/scale.sh over real sshds: replicas come to machines that ssh reaches and go, as a run wants."""

import time
from pathlib import Path

import pytest

from helpers.machines import Machines
from helpers.paths import ROOT
from helpers.runs import assert_clean
from laminar_hpc.machine.files import jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUN_SECONDS = 400
# one slow request at a time: the trainer, also of a busy machine, waits until there are two replicas
RUN = [
    *("experiment=demo", "rollout.engine=emulated", "rollout.max_concurrent=1", "emulation.time_scale=1.5"),
    *("rollout.replicas=1:2", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2"),
    *("sampling.max_response_tokens=48", "evaluation.problems=8", "steps=2000", "checkpoint.every=1000"),
]


def test_a_run_grows_over_ssh(two: Machines, tmp_path: Path) -> None:
    """The first machine has controller and trainer, the second one relay and replica. Another one is asked
    for, and comes to the second one by ssh, as the first on the list cannot be reached. A signal stops the
    run in order, and no process is left."""
    run_dir, out, program, hosts = (tmp_path / name for name in ("run", "out", "scale", "hosts"))
    hosts.write_text("nowhere\n\nm2\n")
    program.write_text(
        f"#!/bin/sh\nexport SSH='ssh -n -F {two.config}'\n"
        f'exec {ROOT}/launch/scale.sh {hosts} {" ".join(RUN)} "$@"\n'
    )
    program.chmod(0o700)
    launcher = two.launch(out, *RUN, f"run_dir={run_dir}", f"cluster.scale_command={program}")

    def wait_for(condition, what: str) -> None:
        deadline = time.monotonic() + RUN_SECONDS
        while not condition():
            assert time.monotonic() < deadline and launcher.poll() is None, (
                f"{what}: {out.read_text()[-3000:]}"
            )
            time.sleep(0.2)

    wait_for(lambda: list(jsonl.read(run_dir / "metrics.jsonl", "scaled")), "the gain")
    (grown,) = jsonl.read(run_dir / "metrics.jsonl", "scaled")
    assert (grown["before"], grown["replicas"]) == (1, 2)
    assert [path.name for path in (run_dir / "hosts").iterdir()] == ["m2"]
    assert "nowhere" in (run_dir / "logs" / "scale.log").read_text()
    launcher.terminate()  # as Ctrl-C
    assert launcher.wait(RUN_SECONDS) == 0, out.read_text()
    deadline = time.monotonic() + 60
    while left := two.processes(run_dir):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert_clean(run_dir)
