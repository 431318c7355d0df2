"""A profile of a whole run on real parts."""

import pytest

from helpers.runs import Run


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_is_profiled(tmp_path):
    """Promise: observability.profile leaves a trace and a table of the trainer's step, and SGLang's trace of
    replica 0's engine, and the run is as ever."""
    run = Run(tmp_path / "run", "steps=3", "observability.profile=1", "algorithm.prompts_per_step=8")
    assert run.finish() == 0, run.lines
    folder = tmp_path / "run" / "profile"
    assert "step 1" in (folder / "trainer0.txt").read_text()
    assert (folder / "trainer0.json.gz").stat().st_size > 10_000
    assert len(list(folder.glob("engine0-*TP-0*.trace.json.gz"))) == 1
