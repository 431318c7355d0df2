"""Every pipeline, and repack both ways, in short runs of the demo on real SGLang and real Megatron."""

import pytest
from runs import Run, metrics, summary

STEPS = 6
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(run_dir, *words: str) -> dict:
    """A run to its end; its summary, with what holds for all of them asserted."""
    started = Run(run_dir, f"steps={STEPS}", "evaluation.files=[]", *words)
    try:
        assert started.finish(540) == 0, started.lines
    finally:
        started.process.kill()
    figures = summary(run_dir)
    assert not started.errors and figures["steps"] == STEPS and figures["trajectories_trained"] == STEPS * 256
    assert (run_dir / "report.html").stat().st_size > 20_000
    return figures


@pytest.mark.parametrize(
    "words, staleness",
    [(["pipeline=one_step"], 1), (["pipeline=stream"], 1), (["pipeline=partial"], 4), (["pipeline=partial", "pipeline.keep_kv=true"], 4)],
)
def test_a_pipeline_trains(tmp_path, words, staleness):
    """Its bound on staleness holds. Under one policy per trajectory the trainer computes the engine's log-probs anew; only `partial` mixes
    policies, and there the gap is taken on trajectories that are of one."""
    figures = run(tmp_path / "run", *words)
    assert figures["staleness_training_max"] <= staleness and figures["logprob_gap_mean"] < 1e-3
    mixed = words[0] == "pipeline=partial"
    assert figures["max_versions_per_trajectory"] > 1 if mixed else figures["max_versions_per_trajectory"] == 1
