"""The end of every test with a run: its records are audited."""

from pathlib import Path

from laminar_hpc.audit.checks import audit
from laminar_hpc.audit.records import read


def assert_clean(run_dir: Path) -> None:
    """As `laminar audit` with exit code 0; of a run that was refused before it began there is nothing to
    audit."""
    if (run_dir / "metrics.jsonl").is_file():
        with read(run_dir) as records:
            culprits = [f"{finding.name}: {text}" for finding in audit(records) for text in finding.culprits]
        assert not culprits, culprits
