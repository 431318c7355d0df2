"""train.sbatch of a project that `laminar init` made, submitted to a real Slurm as its README says."""

import json
from pathlib import Path

import pytest

from laminar_hpc.launch import project

pytestmark = pytest.mark.slurm


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_projects_job_script_runs_as_it_is(slurm_cluster, tmp_path: Path) -> None:
    """Four ranks on one node find data, reward and model of the project, train and write its report; only the
    CPUs are fewer here."""
    made = tmp_path / "mine"
    project.make(made)
    words = (
        f"--chdir={made}",
        "--cpus-per-task=2",
        str(made / "train.sbatch"),
        "steps=2",
        "evaluation.files=[]",
    )
    job = slurm_cluster.submit(*words, OMP_NUM_THREADS="1")
    assert slurm_cluster.wait(job, 420) == "COMPLETED", slurm_cluster.output(job)[-3000:]
    assert json.loads((made / f"runs/slurm-{job}/summary.json").read_text())["steps"] == 2
