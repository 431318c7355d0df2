"""What slurm/common.sh does on a node, without Slurm."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from helpers.paths import ROOT

SCRIPT = ROOT / "slurm" / "common.sh"


def bash(folder: Path, command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-c", f". {SCRIPT}; {command}"],
        env={**os.environ, "SLURM_SUBMIT_DIR": str(folder), "RUN_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_job_that_starts_on_a_full_disk_waits_for_room(tmp_path: Path) -> None:
    """Promise (docs/promises.md#failure-domains): a requeued job does not end because the run's folder is
    full when it starts: the others would wait for it in vain."""
    file = tmp_path / "controller.7.1"
    file.symlink_to("/dev/full")
    script = bash(tmp_path, f"with_room put {file} n1")
    assert script.stdout is not None
    assert script.stdout.readline().rstrip().endswith(f"laminar: waits for room in {tmp_path}")
    file.unlink()
    assert script.communicate(timeout=60) == ("", "") and script.returncode == 0
    assert file.read_text() == "n1\n"


def test_a_full_disk_is_known_whatever_language_the_user_speaks(tmp_path: Path) -> None:
    """Promise: the same where a command, and not bash itself, says that there is no room."""
    script = f"""mk() {{ bash -c '[ "${{LC_ALL:-}}" = C ] || exit 1; [ -e {tmp_path}/said ] && exit
echo "mkdir: No space left on device" >&2; touch {tmp_path}/said; exit 1'; }}
unset LC_ALL; with_room mk"""
    said, error = bash(tmp_path, script).communicate(timeout=60)
    assert said.rstrip().endswith(f"laminar: waits for room in {tmp_path}") and not error


STUBS = """
job="JobId=7 EndTime=Unknown JobState=RUNNING Restarts=0"
scontrol() { case "$*" in "show hostnames"*) seq -f n%g 20000 ;; *) echo "$job" ;; esac; }
squeue() { :; }
srun() { echo "srun was called"; }
"""


def test_a_signal_that_comes_before_the_script_can_hear_it_counts(tmp_path: Path) -> None:
    """Promise (docs/promises.md#failure-domains): a job that is told of its end in its first moments does
    not die of the signal, but is requeued before it starts anything."""
    script = (SCRIPT.parent / "trainer.sbatch").read_text()
    line = next(line for line in script.splitlines() if not line.startswith("#"))
    job = f"{STUBS} export SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=n1; run_job trainer"
    said, error = bash(tmp_path, f"{line}\nkill -USR1 $$\n{job}").communicate(timeout=60)
    assert "told to end (limit)" in said and "requeued, to go on from here" in said, said + error
    assert "trainer on n1; run" in said, "of more names than a pipe holds"
    assert "srun was called" not in said
    firsts = [
        next(line for line in path.read_text().splitlines() if not line.startswith("#"))
        for path in SCRIPT.parent.glob("*.sbatch")
    ]
    assert firsts and all(first == line for first in firsts), firsts


@pytest.mark.parametrize(
    ("began", "ends", "word"),
    [
        ("2030-01-01T12:00:00", "2030-01-01T12:00:00", "limit"),
        ("2030-01-01T12:00:00", "2030-01-01T09:00:30", "now"),
        ("Unknown", "2030-01-01T09:00:30", "now"),
        ("Unknown", "Unknown", "limit"),
    ],
)
def test_usr1_at_preemption_is_told_from_the_time_limit_s(
    tmp_path: Path, began: str, ends: str, word: str
) -> None:
    """Promise (docs/promises.md#failure-domains): with PreemptParameters=send_user_signal a job that is
    preempted gets USR1 in place of TERM, and Slurm has brought its end forward: it leaves at once."""
    script = f"""{STUBS}
of() {{ job="JobId=7 EndTime=$1 JobState=RUNNING Restarts=0"; }}
SLURM_JOB_ID=7 end={tmp_path}/end; of {began}; LAMINAR_JOB_END=$(end_of_time); of {ends}; limit_or_now"""
    said, error = bash(tmp_path, script).communicate(timeout=60)
    assert f"told to end ({word})" in said and not error, said + error
    assert (tmp_path / "end").read_text().strip() == word


@pytest.mark.parametrize(("state", "queued"), [("PENDING", True), ("RUNNING", False), ("", False)])
def test_the_controller_s_job_sees_that_the_trainers_wait(tmp_path: Path, state: str, queued: bool) -> None:
    """Promise (docs/promises.md#failure-domains): Slurm is asked now and then whether the trainers' job
    is in its queue, also where its last life was told of its end before it went there."""
    stubs = STUBS.replace("squeue() { :; }", f"squeue() {{ echo {state}; }}")
    stubs = stubs.replace("Restarts=0", "Restarts=1")
    own = "export SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=n1; VENV="
    life = "touch $RUN_DIR/controller.json; srun() { kill -TERM $$; sleep 1; }; run_job trainer"
    trainer = f"{stubs} {own}; {life}"
    said, error = bash(tmp_path, trainer).communicate(timeout=60)
    assert "this life of the job is over" in said and not error, said + error
    controller = f"{stubs} QUEUE_SECONDS=0; noted=0; RUN_DIR={tmp_path}; note_queue"
    said, error = bash(tmp_path, controller).communicate(timeout=60)
    assert (said, error, (tmp_path / "jobs" / "queued.trainer").exists()) == ("", "", queued)


def job(folder: Path, role: str, restarts: int, submitted: str) -> subprocess.Popen[str]:
    """Such a job, whose controller is not there, in a run that has ended an hour ago."""
    about = f"SubmitTime=$(date -Is -d '{submitted}') EndTime=Unknown JobState=RUNNING Restarts={restarts}"
    stubs = STUBS.replace("EndTime=Unknown JobState=RUNNING Restarts=0", about)
    own = f"export SLURM_JOB_ID=7 SLURM_RESTART_COUNT={restarts} SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=n1"
    return bash(folder, f"{stubs} {own}; run_job {role}")


@pytest.mark.parametrize("how", ["ended", "failed"])
def test_a_job_that_starts_after_the_end_of_its_run_waits_for_nobody(tmp_path: Path, how: str) -> None:
    """Promise (docs/promises.md#failure-domains): one that was preempted, or was still in the queue, and
    has its nodes when the run is over gives them back. Jobs that were submitted to go on with such a run
    wait for its next controller."""
    mark = tmp_path / "jobs" / how
    mark.parent.mkdir()
    for role, restarts, submitted in [
        ("rollouts", 1, "now"),
        ("trainer", 0, "2 hours ago"),
        ("controller", 1, "now"),
    ]:
        mark.touch()
        os.utime(mark, (time.time() - 3600,) * 2)
        said, error = job(tmp_path, role, restarts, submitted).communicate(timeout=60)
        assert f"the run has {how}" in said and "requeued" not in said and not error, said + error
        assert f"{role} ended with exit code {int(how == 'failed')}" in said and "srun" not in said
    for role, other in ("rollouts", "the controller"), ("controller", "the job of the trainer"):
        script = job(tmp_path, role, 0, "now")
        assert script.stdout is not None
        said = script.stdout.readline() + script.stdout.readline()
        assert f"waits for {other}" in said and mark.exists() == (role == "rollouts")
        script.send_signal(signal.SIGUSR1)
        said, error = script.communicate(timeout=60)
        assert "requeued, to go on from here" in said and not error, said + error


@pytest.mark.parametrize("code", [0, 2])
def test_a_heterogeneous_job_ends_the_waiting_of_others(tmp_path: Path, code: int) -> None:
    """Promise (docs/promises.md#failure-domains): what an earlier end of its run has left is not taken for
    its own, and jobs of rollouts that wait for its controller end when it could not begin."""
    mark = tmp_path / "jobs" / "ended"
    mark.parent.mkdir()
    mark.touch()
    os.utime(mark, (time.time() - 3600,) * 2)
    about = "SubmitTime=$(date -Is) EndTime=Unknown JobState=RUNNING Restarts=0"
    stubs = STUBS.replace("EndTime=Unknown JobState=RUNNING Restarts=0", about)
    stubs = stubs.replace('echo "srun was called"', f"return {code}")
    own = "export SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=3 SLURM_JOB_NODELIST=n1; VENV="
    nodes = "; ".join(f"export SLURM_JOB_NUM_NODES_HET_GROUP_{group}=1" for group in range(3))
    said, error = bash(tmp_path, f"{stubs} {own}; {nodes}; run_job hetjob").communicate(timeout=60)
    assert f"hetjob ended with exit code {code}" in said and not error, said + error
    assert [path.name for path in mark.parent.iterdir()] == ([] if code == 0 else ["failed"])


@pytest.mark.parametrize(
    ("role", "codes", "last", "starts"),
    [
        ("rollouts", "137 0", 0, 2),
        ("trainer", "1", 1, 1),
        ("trainer", "137 137 137", 137, 3),
        ("all", "137", 137, 1),
    ],
)
def test_an_agent_that_was_killed_is_started_again(
    tmp_path: Path, role: str, codes: str, last: int, starts: int
) -> None:
    """Promise (docs/promises.md#failure-domains): a node's agent is a process that may die like any other,
    but in one world; what dies again and again ends the job."""
    (tmp_path / "controller.json").touch()
    counted = f"n=$(cat {tmp_path}/n 2>/dev/null || echo 0); echo $((n + 1)) >{tmp_path}/n"
    srun = f"srun() {{ {counted}; codes=({codes}); return ${{codes[$n]}}; }}"
    own = "export SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=n1; VENV= AGENTS_AGAIN=2"
    said, error = bash(tmp_path, f"{STUBS} {srun}; {own}; run_job {role}").communicate(timeout=60)
    assert f"{role} ended with exit code {last}" in said and not error, said + error
    assert (
        said.count(f"the agent of the {role} has ended with exit code 137, killed by SIGKILL") == starts - 1
    )
    assert (tmp_path / "n").read_text() == f"{starts}\n"


def test_what_cannot_be_written_at_all_is_said(tmp_path: Path) -> None:
    """Promise: only a full disk is waited for."""
    (tmp_path / "file").write_text("")
    script = bash(tmp_path, f"with_room mkdir -p {tmp_path}/file/jobs")
    said, error = script.communicate(timeout=60)
    assert said == "" and "laminar: error: mkdir: " in error and script.returncode == 1
