"""What a trainer's update and an engine's admission cost: against closed forms, and against what the engine's
own scheduler does."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.simulator.constants import DEFAULT, GPUS, MODELS
from laminar_hpc.simulator.cost import Layout, engine_costs, job_costs, trainer_layout
from laminar_hpc.simulator.replica import Replica
from laminar_hpc.simulator.request import Admission, Request
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.trainer import updates_seconds
from laminar_hpc.simulator.workload import Workload

JOB = job_costs(MODELS["32B"], GPUS["H800"], 64, Layout(8, 1, 8), 64, 16384, DEFAULT)


@given(
    tokens=st.lists(st.integers(1, 16384), min_size=1, max_size=200),
    updates=st.integers(1, 4),
    ranks=st.integers(1, 8),
)
def test_an_update_takes_no_less_than_its_work_and_no_more_than_all_of_it_on_one_rank(tokens, updates, ranks):
    """With one rank it is the work: 6 P per token and the attention's share per squared token."""
    work = sum(n * JOB.train_token + n * n * JOB.train_attention for n in tokens)
    found = updates_seconds(tokens, updates, JOB, Layout(8, 1, ranks), np.random.default_rng(0))
    assert work * (1 - 1e-9) <= found <= work * ranks * (1 + 1e-9)
    assert math.isclose(
        updates_seconds(tokens, updates, JOB, Layout(8, 1, 1), np.random.default_rng(0)), work
    )


@given(stages=st.integers(1, 8), each=st.integers(1, 32), length=st.integers(1, 16384))
def test_the_pipeline_bubble_of_even_micro_batches(stages, each, length):
    """(m + p - 1) / m times as long with m equal trajectories per rank and p stages."""
    tokens = [length] * each * 4
    flat, staged = (
        updates_seconds(tokens, 2, JOB, Layout(8, p, 2), np.random.default_rng(0)) for p in (1, stages)
    )
    assert math.isclose(staged / flat, (each + stages - 1) / each)


@given(first=st.integers(0, 30000), rest=st.integers(1, 30000))
def test_a_prefill_in_two_parts_costs_what_one_costs(first, rest):
    """Attention of the second part sees the first."""
    costs = engine_costs(MODELS["7B"], GPUS["H800"], 1, DEFAULT)
    assert math.isclose(
        costs.prefill(first, 0) + costs.prefill(first + rest, first), costs.prefill(first + rest, 0)
    )


@pytest.mark.parametrize(
    ("model", "gpus", "layout"),
    [
        ("7B", 16, (4, 1, 4)),
        ("32B", 64, (8, 1, 8)),
        ("72B", 768, (8, 2, 48)),
        ("72B", 64, (8, 2, 4)),
        ("32B", 8, None),
    ],
)
def test_layout_of_the_trainer(model, gpus, layout):
    """The trainer's layout is the published system's; None where the model does not fit."""
    found = trainer_layout(MODELS[model], GPUS["H800"], gpus, DEFAULT)
    assert (found and (found.tensor, found.stages, found.ranks)) == layout


def replica(capacity: float, longest: int = 16384) -> Replica:
    return Replica(
        0,
        engine_costs(MODELS["32B"], GPUS["H800"], 4, DEFAULT),
        capacity,
        999,
        Admission.of(longest, DEFAULT),
        4,
    )


def test_an_engine_from_idle_keeps_seven_tenths_of_4096_tokens_per_request():
    """SGLang: each request in the batch is expected to grow by 0.7 x 4,096 tokens, the next one by all of
    4,096."""
    engine = replica(100_000)
    engine.waiting.extend(Request(i, None, [9000], [], 100, 0) for i in range(99))
    engine.fill()
    n = len(engine.running)
    assert n * 100 + (n - 1) * 0.7 * 4096 + 4096 <= 100_000 < (n + 1) * 100 + n * 0.7 * 4096 + 4096


def test_at_the_limit_the_least_generated_goes_to_the_end_of_the_queue():
    """And the reserve becomes what the rest has generated so far, out of the longest allowed."""
    engine = replica(20_000)
    engine.waiting.extend(Request(i, None, [9000], [], 100, 0) for i in range(3))
    engine.fill()
    engine.advance(engine.next_time(), at_event=True)  # full: three of 6,667
    late, queued = Request(7, None, [9000], [], 50, 0), Request(8, None, [9000], [], 100, 0)
    engine._admit(late)
    engine.waiting.append(queued)
    engine.make_room()
    assert [r.trajectory_id for r in engine.waiting] == [8, 7, 2] and engine.preemptions == 2
    assert [r.uncached for r in (late, engine.waiting[2])] == [50.0, engine.waiting[2].context]
    assert math.isclose(engine.ratio, (20_000 / 3 - 100 + 20) / 16384)
    steps = engine.steps
    engine.steps += 300
    assert math.isclose(engine.reserve(), 4096 * (engine.ratio - 300 * (0.7 - 0.098) / 600))
    engine.steps = steps + 3000
    assert math.isclose(engine.reserve(), 4096 * 0.098)


def test_vllm_admits_what_fits_now_and_puts_the_newest_back_at_the_head():
    """vLLM keeps nothing free for growth; the last one admitted is preempted first and is the next to come
    back."""
    engine = Replica(
        0,
        engine_costs(MODELS["32B"], GPUS["H800"], 4, DEFAULT),
        1020,
        999,
        Admission.of(16384, DEFAULT, "vllm"),
        4,
    )
    engine.waiting.extend(Request(i, None, [9000], [], 100, 0) for i in range(12))
    engine.fill()
    assert [r.trajectory_id for r in engine.running.values()] == list(range(10))
    engine.advance(engine.next_time(), at_event=True)  # full: ten of 102
    engine.make_room()
    assert [r.trajectory_id for r in engine.waiting] == [9, 10, 11] and engine.preemptions == 1
    engine.fill()
    assert len(engine.running) == 9, "its own room is too little for it and the growth of the others"


def test_the_lengths_of_the_paper_have_a_p99_of_ten_medians():
    """Laminar's introduction; what `WorkloadConfig` has by default, of at most 16,384."""
    work = Workload(WorkloadConfig(), 0, 1)
    lengths = np.array([work.lengths(i) for i in range(1024)]).ravel()
    assert abs(np.quantile(lengths, 0.99) / np.median(lengths) / 10 - 1) < 0.07
    assert abs(lengths.mean() / WorkloadConfig().mean_response_tokens - 1) < 0.05


def test_handling_of_the_batch_does_not_shrink_with_gpus():
    """Per trajectory and pass the same on any number of GPUs; everything else of the trainer does."""
    large = job_costs(MODELS["32B"], GPUS["H800"], 128, Layout(8, 1, 16), 64, 16384, DEFAULT)
    assert large.handling == JOB.handling and math.isclose(large.train_token * 2, JOB.train_token)
    assert math.isclose(JOB.handling * 8192, 2 * 35.2 * 16384 / 28672)
