"""What `laminar train restarts=N` starts again, and what not. The lives of the job are scripted; that a real
death leads to a real restart is in tests/system."""

import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch import launch, supervisor
from laminar_hpc.line.agent_line import PERMANENT


@dataclass
class Life:
    """How the ranks end: the first one's exit code, why, after which step; `begins` writes a start to the
    metrics."""

    code: int = 1
    cause: str = "relay 0 (pid 7) has died; see logs, then go on with the same command and resume=auto"
    step: int = 0
    begins: bool = True
    clock: float = 0.0  # seconds by which it was set when the life has begun
    during: list[int] = field(default_factory=list)  # signals that arrive


@pytest.fixture
def job(tmp_path, monkeypatch, capsys):
    """Runs the supervisor over scripted lives; gives (exit code, overrides of each life, lines of stdout, of
    stderr)."""

    def run(restarts: int, *lives: Life) -> tuple[int, list[list[str]], list[str], list[str]]:
        started: list[list[str]] = []

        class Scripted:
            joined_as, is_refused = "", False

            def __init__(self, words: list[str], **_: object) -> None:
                self.life = lives[len(started)]
                started.append(words)
                self.causes = [self.life.cause]
                self.failed = (0, self.life.code) if self.life.code else None

            def look(self) -> bool:
                with open(tmp_path / "metrics.jsonl", "a") as file:
                    if self.life.begins:
                        file.write(
                            json.dumps(
                                {"kind": "start", "time": time.time() + self.life.clock},
                                separators=(",", ":"),
                            )
                            + "\n"
                        )
                    if self.life.step:
                        file.write(f'{{"kind":"step","step":{self.life.step}}}\n')
                for number in self.life.during:
                    os.kill(os.getpid(), number)
                return True

            def close(self, log: Path) -> None: ...
            def end(self, seconds: float) -> None: ...

        monkeypatch.setattr(launch, "Life", Scripted)
        handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        try:
            code = supervisor.run(RunConfig(run_dir=str(tmp_path), restarts=restarts), ["resume=never"], 4)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        said = capsys.readouterr()
        return code, started, said.out.splitlines(), said.err.splitlines()

    return run


def restarts_on_record(folder: Path) -> list[dict]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "restart"]


def test_a_death_is_followed_by_a_resume(job, tmp_path):
    """Promise: one line per restart with its cause, kept in the metrics; the next life resumes."""
    code, started, said, errors = job(
        2, Life(step=3), Life(step=5, cause="rollout 0 was killed"), Life(code=0)
    )
    assert code == 0 and errors == []
    assert started == [["resume=never"], ["resume=never", "resume=auto"], ["resume=never", "resume=auto"]]
    cause = "relay 0 (pid 7) has died; see logs"
    assert said[0] == f"restart      1 of 2 within an hour, from the beginning: {cause}" and len(said) == 2
    kept = restarts_on_record(tmp_path)
    assert [(record["cause"], record["step"]) for record in kept] == [(cause, 3), ("rollout 0 was killed", 5)]


def test_an_earlier_run_is_not_resumed_by_a_restart(job, tmp_path):
    """Promise: if the first life dies before it has moved an earlier run aside, the next one still does."""
    (tmp_path / "metrics.jsonl").write_text('{"kind":"start","time":1.0}\n')
    code, started, _, _ = job(1, Life(begins=False), Life(code=0))
    assert code == 0 and started == [["resume=never"], ["resume=never"]]


def test_a_clock_that_is_set_back_moves_no_run_aside(job):
    """Promise: a restart goes on with the run that this job has begun, whatever the clock says."""
    code, started, _, _ = job(1, Life(clock=-3600.0), Life(code=0))
    assert code == 0 and started == [["resume=never"], ["resume=never", "resume=auto"]]


@pytest.mark.parametrize(
    ("restarts", "lives", "why"),
    [
        (0, [Life()], "resume=auto"),
        (3, [Life(code=2)], "resume=auto"),
        (3, [Life(code=PERMANENT)], "resume=auto"),
        (3, [Life(during=[signal.SIGTERM])], "resume=auto"),
        (1, [Life(step=1), Life(step=2)], "; not started again: restarts=1: so many restarts"),
        (9, [Life(step=1), Life(step=1)], "; not started again: the same happened before, also after step 1"),
    ],
    ids=["restarts=0", "refused", "permanent", "stopped", "limit", "no progress"],
)
def test_what_is_not_started_again(job, restarts, lives, why):
    """Promise: a refusal, a failure that stays, a stop, a used-up limit and a repeated death end the job, in
    one line."""
    code, started, said, errors = job(restarts, *lives)
    assert (
        code == (2 if lives[-1].code == 2 else 1)
        and len(started) == len(lives)
        and len(said) == len(lives) - 1
    )
    assert why in errors[-1] and len(errors) == 1 + bool(lives[0].during)  # of a stop that nobody can be told
