"""Whether a run has ended, and why, as its files say."""

from pathlib import Path

from laminar_hpc.line.address import ADDRESS_FILE
from laminar_hpc.machine.files import jsonl


def last_word(run_dir: Path) -> str:
    """Why the run ended, as its controller wrote: "done", "failed: ...", or what asked it to stop, and why it
    could not do that in order. "" while it goes on, or if no controller could say it."""
    last = _last_record(run_dir)
    return str(last.get("reason", "")) if last.get("kind") == "end" else ""


def last_end(run_dir: Path) -> str:
    """Why the run ended the last time that it said so, though it may have begun again since."""
    reason = ""
    for record in jsonl.read(run_dir / "metrics.jsonl", "end"):
        reason = str(record.get("reason", ""))
    return reason


def goes_on(run_dir: Path) -> bool:
    """Whether a controller serves the run, or is still to come back: while one starts again, which takes long
    on a full disk, there is no address."""
    return (run_dir / ADDRESS_FILE).exists() or _last_record(run_dir).get("kind") == "start"


def _last_record(run_dir: Path) -> dict:
    last: dict = {}
    for record in jsonl.read(run_dir / "metrics.jsonl", "start", "end"):
        last = record
    return last
