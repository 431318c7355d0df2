"""Every pipeline, and repack both ways, in short runs of the demo on real SGLang and real Megatron."""

import pytest

from helpers.runs import Run, metrics, summary
from laminar_hpc.report import rundata

STEPS = 6
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(run_dir, *words: str, steps: int = STEPS) -> dict:
    """A run to its end; its summary, with what holds for all of them asserted."""
    started = Run(run_dir, f"steps={steps}", "evaluation.files=[]", *words)
    try:
        assert started.finish(540) == 0, started.lines
    finally:
        started.process.kill()
    figures = summary(run_dir)
    assert not started.errors and figures["steps"] == steps and figures["trajectories_trained"] == steps * 256
    assert (run_dir / "report.html").stat().st_size > 20_000
    return figures


@pytest.mark.parametrize(
    "words, staleness",
    [
        (["pipeline=one_step"], 1),
        (["pipeline=stream"], 1),
        (["pipeline=partial"], 4),
        (["pipeline=partial", "pipeline.keep_kv=true"], 4),
    ],
)
def test_a_pipeline_trains(tmp_path, words, staleness):
    """Its bound on staleness holds. Under one policy per trajectory every trajectory is of one; `partial`
    mixes them. On the fixed probe engine and trainer agree."""
    figures = run(tmp_path / "run", *words)
    assert figures["staleness_training_max"] <= staleness and figures["logprob_mismatch_mean"] < 1e-3
    mixed = words[0] == "pipeline=partial"
    assert (
        figures["max_versions_per_trajectory"] > 1 if mixed else figures["max_versions_per_trajectory"] == 1
    )


@pytest.mark.parametrize("how", ["kv", "reprefill"])
def test_tails_move_between_two_replicas(tmp_path, how):
    """Small local batches of short and long responses, looked at often: moves come about by the planner
    alone, and nothing breaks."""
    figures = run(
        tmp_path / "run",
        "rollout.replicas=2",
        f"pipeline.repack={how}",
        "pipeline.repack_seconds=0.05",
        "pipeline.repack_requests=64",
        "pipeline.local_batch_groups=8",
        "sampling.max_response_tokens=480",
        "sampling.temperature=1.2",
        "pipeline.max_staleness=6",
        steps=24,
    )
    assert (
        figures["max_versions_per_trajectory"] == 1
        and figures["staleness_training_max"] <= 6
        and figures["logprob_mismatch_mean"] < 1e-3
    )
    moves = metrics(tmp_path / "run", "move")
    assert len(moves) == figures["trajectories_moved"] >= 1
    came = [
        s.fields
        for spans in rundata.load(tmp_path / "run").spans.values()
        for s in spans
        if s.kind == "move" and s.fields.get("came")
    ]
    cached = sum(
        move["cached_tokens"] for move in came
    )  # by the destinations' engines, as they took the requests up
    if how == "kv":
        assert (
            figures["prefill_tokens_saved"] > figures["tokens_moved"] > 0
            and cached >= 0.8 * figures["prefill_tokens_saved"]
        )
    else:
        assert figures["prefill_tokens_saved"] == 0
