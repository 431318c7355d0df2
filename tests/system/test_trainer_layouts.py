"""Whole runs whose trainer is split over two ranks, on real parts: the engines serve what the trainers train,
at every layout."""

import pytest

from helpers.runs import Run, metrics, summary
from laminar_hpc.store.checkpoints import checkpoint_path, read_state

STEPS = 4
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("kind", ["tensor", "context", "pipeline", "data"])
def test_a_run_with_two_trainer_ranks(kind, tmp_path):
    """The weights of every step reach the engine with the right sums, its log-probs are the trainer's to
    1e-3, one policy each."""
    run = Run(
        tmp_path / f"two-trainers-{kind}",
        f"trainer.{kind}_parallel=2",
        f"steps={STEPS}",
        "rollout.engine_start_seconds=600",
    )
    assert run.finish(840) == 0, run.lines
    run.assert_gone()
    figures, mismatches = summary(run.run_dir), metrics(run.run_dir, "logprob_mismatch")
    assert (
        figures["steps"] == STEPS
        and figures["trajectories_trained"] == STEPS * 256
        and figures["max_versions_per_trajectory"] == 1
    )
    assert {g["step"] for g in mismatches} >= {0, STEPS} and max(g["max"] for g in mismatches) < 1e-3
    assert read_state(checkpoint_path(run.run_dir, STEPS))[f"{kind}_parallel"] == 2


def test_a_run_with_two_lanes_to_an_engine_of_two_ranks(tmp_path):
    """Two trainer ranks send, two relays fill each slot, two engine ranks load it: what leaves per
    publication are the canonical bytes, to 1%, half of them through each relay."""
    words = (
        "trainer.tensor_parallel=2",
        "relay.lanes=2",
        "rollout.tensor_parallel=2",
        "rollout.engine_start_seconds=600",
    )
    run = Run(tmp_path / "run", *words, f"steps={STEPS}")
    assert run.finish(840) == 0, run.lines
    run.assert_gone()
    figures, mismatches = summary(run.run_dir), metrics(run.run_dir, "logprob_mismatch")
    assert figures["steps"] == STEPS and figures["max_versions_per_trajectory"] == 1
    assert {g["step"] for g in mismatches} >= {0, STEPS} and max(g["max"] for g in mismatches) < 1e-3
    size = metrics(run.run_dir, "start")[0]["derived"]["publish_bytes"]
    assert all(size <= p["bytes"] <= 1.01 * size for p in metrics(run.run_dir, "publish"))
    received = metrics(run.run_dir, "relay")
    assert {r["index"] for r in received} == {0, 1} and all(
        0.4 * size < r["bytes"] < 0.6 * size for r in received
    )
