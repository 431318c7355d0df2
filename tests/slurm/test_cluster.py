"""The Slurm that the other tests of this folder run on is a real one: jobs span nodes, and a node can be lost
and come back."""

import pytest

pytestmark = pytest.mark.slurm


def test_a_job_spans_two_nodes(slurm_cluster) -> None:
    """One allocation holds two nodes with names and addresses of their own, which is what a multi-machine run
    has to cope with."""
    job = slurm_cluster.submit("--nodes=2", "--wrap", "srun --ntasks-per-node=1 hostname")
    assert slurm_cluster.wait(job, 30) == "COMPLETED", slurm_cluster.output(job)
    names = sorted(slurm_cluster.output(job).split())
    assert len(names) == 2 and (slurm_cluster.mode() == "plain" or names == ["n1", "n2"])


@pytest.mark.slow
def test_a_node_is_lost_and_comes_back(slurm_cluster) -> None:
    """Power loss ends the job that runs there and Slurm sees the node as down; afterwards the node takes jobs
    again. Likewise the cable."""
    if slurm_cluster.mode() == "plain":
        pytest.skip("nodes without namespaces of their own cannot lose power: that needs CAP_SYS_ADMIN")

    def is_up() -> bool:
        return slurm_cluster.command("sinfo", "-h", "-n", "n2", "-o", "%T").strip() == "idle"

    job = slurm_cluster.submit("--nodelist=n2", "--no-requeue", "--wrap", "echo started; sleep 600")
    slurm_cluster.poll(lambda: "started" in slurm_cluster.output(job), 30, "the job's first line", job)
    slurm_cluster.node("off", "n2")
    assert slurm_cluster.wait(job, 60) == "NODE_FAIL"
    slurm_cluster.node("on", "n2")
    slurm_cluster.poll(is_up, 60, "n2 after its power came back")
    if slurm_cluster.mode() == "netns":
        slurm_cluster.node("cut", "n2")
        slurm_cluster.poll(lambda: not is_up(), 60, "n2 to be missed")
        slurm_cluster.node("mend", "n2")
        slurm_cluster.poll(is_up, 60, "n2 after its cable came back")
    job = slurm_cluster.submit("--nodes=2", "--wrap", "srun hostname")
    assert slurm_cluster.wait(job, 30) == "COMPLETED"
