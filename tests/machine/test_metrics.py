"""metrics.jsonl keeps its figures, whatever happens to it, and ends no run."""

import resource
from pathlib import Path

from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.observability.metrics import MetricsWriter


def steps(run_dir: Path) -> list[int]:
    return [record["step"] for record in jsonl.read(run_dir / "metrics.jsonl", "step")]


def test_a_removed_file_is_made_again_with_its_lines(tmp_path):
    """Promise (docs/resuming.md): removed under a live run it comes back whole, and a line says so."""
    said = list[str]()
    metrics = MetricsWriter(tmp_path, say=said.append)
    metrics.write("step", step=1)
    metrics.write("step", step=2)
    (tmp_path / "metrics.jsonl").unlink()
    metrics.write("step", step=3)
    metrics.write("step", step=4)
    assert steps(tmp_path) == [1, 2, 3, 4] and len(said) == 1
    assert f"{tmp_path}/metrics.jsonl was removed: it is made again" in said[0]
    metrics.close()
    assert not list(tmp_path.glob(".metrics*"))


def test_a_disk_that_takes_nothing_ends_nobody(tmp_path):
    """Promise (docs/resuming.md): lines that cannot be written wait, in their order, until they can; a line
    says so once."""
    said, (_, hard) = list[str](), resource.getrlimit(resource.RLIMIT_FSIZE)
    metrics = MetricsWriter(tmp_path, say=said.append)
    metrics.write("step", step=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, hard))
    try:
        metrics.write("step", step=2)
        metrics.write("step", step=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert steps(tmp_path) == [1] and len(said) == 1 and "cannot be written" in said[0]
    metrics.write("step", step=4)
    assert steps(tmp_path) == [1, 2, 3, 4]
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size, hard))
    try:
        metrics.write("step", step=5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    metrics.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
