"""The ending of a run: summary, report, closing lines; and a run that was complete before it began."""

from collections.abc import Callable
from pathlib import Path

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.machine.observability import console
from laminar_hpc.store.rundir import completed_step


def finish(run_dir: Path, stopped: str, say: Callable[[str], None]) -> None:
    """Writes summary and report, and says what the run has reached."""
    from laminar_hpc.report import document, rundata, summary  # only now: every command would load them

    run = rundata.load(run_dir)
    figures, page = summary.write(run), document.write(run)
    for text in console.final_lines(figures, run_dir, page, stopped):
        say(text)


def close_completed(config: RunConfig, say: Callable[[str], None]) -> bool:
    """Whether resume=auto finds nothing left to do. Says so, and writes summary and report if missing."""
    step = completed_step(config)
    if step is None:
        return False
    run_dir = Path(config.run_dir)
    newest = (run_dir / "metrics.jsonl").stat().st_mtime if (run_dir / "metrics.jsonl").exists() else 0.0
    written = [
        path.stat().st_mtime for path in (run_dir / "summary.json", run_dir / "report.html") if path.exists()
    ]
    if newest and (len(written) < 2 or min(written) < newest):
        say(console.line("done", "its summary and report were not written: writing them now"))
        finish(run_dir, "", say)
    say(
        console.line(
            "done", f"{run_dir} is complete at step {step}; raise steps to go on, or choose another run_dir"
        )
    )
    return True
