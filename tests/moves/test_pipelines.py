"""The pipelines as policy values, each in a whole emulated run: when replicas refresh, and how old and of how
many policies is what is trained."""

import pytest

from helpers.emulated.stand import Stand, assert_every_one_ended_once, small_config
from laminar_hpc.line.messages.data import Trajectory
from laminar_hpc.report import rundata


def run(tmp_path, steps: int = 4, **pipeline: object) -> tuple[Stand, list[Trajectory]]:
    stand = Stand(small_config(tmp_path, steps=steps, **pipeline))
    stand.run(90)
    return stand, list(assert_every_one_ended_once(stand.config).values())


@pytest.mark.parametrize("bound", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_with_a_barrier_replicas_begin_together(tmp_path, bound):
    """sync (0) and one_step (1): a round's local batches are on one weight id and begin when the last of the
    round before has ended."""
    stand, found = run(tmp_path, refresh="barrier", max_staleness=bound)
    run_data = rundata.load(tmp_path / "run")
    assert max(t.staleness_training for t in run_data.consumed) == bound
    rounds: dict[int, list] = {}
    for spans in run_data.spans.values():
        for number, span in enumerate(s for s in spans if s.kind == "generate"):
            rounds.setdefault(number, []).append(span)
    assert len(rounds) >= stand.config.steps
    for number, spans in rounds.items():
        assert len({span.fields["weight_id"] for span in spans}) == 1
        assert number == 0 or min(s.t0 for s in spans) >= max(s.t1 for s in rounds[number - 1]) - 0.01
    assert {t.policies for t in found} == {1}


def test_a_stream_is_taken_in_mini_batches(tmp_path):
    """stream: each mini-batch is a batch of its own for the trainer, no group is trained twice, the bound
    holds."""
    stand, _ = run(tmp_path, refresh="barrier", max_staleness=1, consumption="stream")
    consumed = rundata.load(tmp_path / "run").consumed
    assert max(t.staleness_training for t in consumed) <= 1
    per_step = [sum(t.consumed_step == step for t in consumed) for step in range(stand.config.steps)]
    assert (
        per_step
        == [stand.config.algorithm.prompts_per_step * stand.config.algorithm.samples_per_prompt]
        * stand.config.steps
    )


@pytest.mark.parametrize("keep_kv", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_new_weights_come_into_running_trajectories(tmp_path, keep_kv):
    """partial: nobody waits for a trajectory to end before it pulls; what ran then has several policies, and
    its spans say which."""
    _, found = run(tmp_path, refresh="interrupt", max_staleness=4, keep_kv=keep_kv)
    assert max(t.policies for t in found) > 1
    assert max(t.staleness_training for t in rundata.load(tmp_path / "run").consumed) <= 4
