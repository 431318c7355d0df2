"""What a trainer's update and an engine's admission cost: against closed forms, and against what the engine's
own scheduler does."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.emulated.launch import prepare
from laminar_hpc.config.system_schema import TrainerConfig
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.cost import engine_costs
from laminar_hpc.simulator.emulated.engine import EmulatedEngine
from laminar_hpc.simulator.published_layout import trainer_layout
from laminar_hpc.simulator.replica import SimulatedReplica
from laminar_hpc.simulator.request import EngineAdmission, SimulatedRequest
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_cost import (
    Layout,
    chunk_exchange_seconds,
    context_exchange_seconds,
    job_costs,
    only_training,
    updates_seconds,
)
from laminar_hpc.simulator.trainer_fit import fitting_trainer, layout_of
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
    [("7B", 16, (1, 2)), ("32B", 64, (2, 4)), ("32B", 128, (4, 2)), ("72B", 768, (8, 2)), ("32B", 8, None)],
)
def test_layout_of_the_trainer(model, gpus, layout):
    """A published system's layout is the fastest that fits, with the fewest stages; None where the model does
    not fit."""
    found = trainer_layout(MODELS[model], GPUS["H800"], gpus, WorkloadConfig(), DEFAULT)
    assert (found and (found.tensor, found.stages)) == layout
    assert not found or found.tensor * found.stages * found.ranks == gpus


def replica(capacity: float, longest: int = 16384) -> SimulatedReplica:
    return SimulatedReplica(
        0,
        engine_costs(MODELS["32B"], GPUS["H800"], 4, DEFAULT),
        capacity,
        999,
        EngineAdmission.of(longest, DEFAULT),
        4,
    )


def test_an_engine_from_idle_keeps_seven_tenths_of_4096_tokens_per_request():
    """SGLang: each request in the batch is expected to grow by 0.7 x 4,096 tokens, the next one by all of
    4,096."""
    engine = replica(100_000)
    engine.waiting.extend(SimulatedRequest(i, None, [9000], 100, 0) for i in range(99))
    engine.fill()
    n = len(engine.running)
    assert n * 100 + (n - 1) * 0.7 * 4096 + 4096 <= 100_000 < (n + 1) * 100 + n * 0.7 * 4096 + 4096


def test_at_the_limit_the_least_generated_goes_to_the_end_of_the_queue():
    """And the reserve becomes what the rest has generated so far, out of the longest allowed."""
    engine = replica(20_000)
    engine.waiting.extend(SimulatedRequest(i, None, [9000], 100, 0) for i in range(3))
    engine.fill()
    engine.advance(engine.next_time(), at_event=True)  # full: three of 6,667
    late, queued = SimulatedRequest(7, None, [9000], 50, 0), SimulatedRequest(8, None, [9000], 100, 0)
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
    engine = SimulatedReplica(
        0,
        engine_costs(MODELS["32B"], GPUS["H800"], 4, DEFAULT),
        1020,
        999,
        EngineAdmission.of(16384, DEFAULT, "vllm"),
        4,
    )
    engine.waiting.extend(SimulatedRequest(i, None, [9000], 100, 0) for i in range(12))
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
    """Per trajectory and pass the same on any number of GPUs; products and exchanges do."""
    large = job_costs(MODELS["32B"], GPUS["H800"], 128, Layout(8, 1, 16), 64, 16384, DEFAULT)
    assert large.handling == JOB.handling and math.isclose(large.train_token * 2, JOB.train_token)
    assert math.isclose(JOB.handling * 8192, 2 * 35.2 * 16384 / 28672)
    assert 0 < JOB.overlapped_handling < JOB.handling / 10


# tokens/s with so many requests of a few hundred tokens, 7B on one H100 in bf16
H100_7B = {1: 131, 32: 5163, 64: 9507, 96: 13588, 128: 16998}


@pytest.mark.parametrize(("requests", "rate"), H100_7B.items())
def test_decode_steps_are_those_that_are_published(requests, rate):
    """Promise: within 15% at every batch size."""
    costs = engine_costs(MODELS["7B"], GPUS["H100"], 1, DEFAULT)
    assert abs(costs.step(requests, 200 * requests) * rate / requests - 1) < 0.15


def test_a_decode_step_that_no_constant_was_fitted_to():
    """72B on two H100 takes 30.9 ms per token (tenstorrent/tt-inference-server, issue 143)."""
    costs = engine_costs(MODELS["72B"], GPUS["H100"], 2, DEFAULT)
    assert abs(costs.step(1, 600) / 30.9e-3 - 1) < 0.1


def test_without_cuda_graphs_a_small_step_takes_as_long_as_its_launches():
    """And a step whose reads take longer hides them."""
    graphs, eager = (engine_costs(MODELS["32B"], GPUS["H800"], 4, DEFAULT, on) for on in (True, False))
    host = DEFAULT.decode_request_seconds
    assert eager.step(1, 100) == 64 * DEFAULT.eager_layer_seconds + host > 1.5 * graphs.step(1, 100)
    assert eager.step(256, 850_000) == graphs.step(256, 850_000)


def test_a_step_reads_the_experts_that_its_tokens_use():
    """One token of 30B-A3B reads 8 of 128 experts, many tokens nearly all; a dense model reads the same for
    any number."""
    sparse = engine_costs(MODELS["Qwen3-30B-A3B"], GPUS["H100"], 2, DEFAULT)
    one, many = (sparse.at(n) - sparse.overhead - n * sparse.request for n in (1, 512))
    assert math.isclose(one, sparse.weights + sparse.experts * 8 / 128)
    assert math.isclose(many, sparse.weights + sparse.experts, rel_tol=0.01)


def test_a_batch_computes_what_the_next_cuda_graph_computes():
    """Between multiples of eight the step is as long, where products decide; up to eight each size has its
    own."""
    costs = engine_costs(MODELS["7B"], GPUS["H20"], 1, DEFAULT)
    assert costs.at(1001) == costs.at(1008) < costs.at(1009)


def update(gpus: int, logprobs: bool = True) -> float:
    """Seconds of a step of verl's 7B on H20, whose Ulysses groups of four divide a sequence."""
    work = WorkloadConfig(mean_response_tokens=1200, max_response_tokens=28672, sigma=1.69)
    draw = Workload(work, 0, 1)
    tokens = [n + 150 for index in range(512) for n in draw.lengths(index)]
    layout = Layout(4, 1, gpus // 4)
    costs = job_costs(MODELS["7B"], GPUS["H20"], gpus, layout, gpus, 28672, DEFAULT)
    seconds = updates_seconds(tokens, 16, costs, layout, np.random.default_rng(0)) + 16 * costs.update
    return seconds + logprobs * (sum(tokens) * costs.logprob_token + len(tokens) * costs.handling / 2)


def test_more_trainer_gpus_help_as_much_as_published():
    """verl, docs/advance/fully_async.md: log-probs and updates of its colocated runs take 377.5, 203.7 and
    167.7 s on 32, 64 and 128 GPUs, updates of its asynchronous ones 313.8 s on 16 and 113.2 s on 64."""
    assert abs(update(32) / update(128) / (377.5 / 167.7) - 1) < 0.2
    assert abs(update(64) / update(128) / (203.7 / 167.7) - 1) < 0.2
    assert abs(update(16, False) / update(64, False) / (313.8 / 113.2) - 1) < 0.2


def test_an_emulated_replica_has_as_many_gpus_as_asked(tmp_path):
    """Promise: emulation.tensor_parallel is the number of GPUs of a replica, null the model's own."""
    config = prepare(tmp_path, 1, 10, 64)
    config.emulation.model = "32B"

    def reading(tensor_parallel: int | None) -> float:
        config.emulation.tensor_parallel = tensor_parallel
        return EmulatedEngine(config, 0, tmp_path).costs.weights

    assert reading(None) == reading(4) == pytest.approx(reading(8) * 2)


@given(tokens=st.lists(st.integers(1, 16384), min_size=1, max_size=200), ranks=st.integers(1, 8))
def test_ranks_balanced_by_tokens_take_the_mean_or_the_longest_trajectory(tokens, ranks):
    """Promise: of a run of our own, whose trainer deals trajectories out by their tokens, an update takes the
    mean over its ranks or the longest trajectory alone, so no longer than when they are dealt at random."""
    job, random = only_training(1.0 / ranks), np.random.default_rng(0)
    balanced = updates_seconds(tokens, 1, job, Layout(1, 1, ranks, balanced=True), random)
    assert balanced == pytest.approx(max(sum(tokens) / ranks, max(tokens)))
    assert balanced <= updates_seconds(tokens, 1, job, Layout(1, 1, ranks), random) * (1 + 1e-9)


@given(
    tokens=st.lists(st.integers(1, 16384), min_size=1, max_size=200),
    ranks=st.integers(1, 8),
    stages=st.sampled_from([2, 4, 8]),
)
def test_a_trajectory_goes_through_all_stages_of_a_balanced_rank(tokens, ranks, stages):
    """Promise: the longest trajectory alone leaves the other stages idle, also where ranks are balanced."""
    job, random = only_training(1.0 / ranks), np.random.default_rng(0)
    balanced = updates_seconds(tokens, 1, job, Layout(1, stages, ranks, balanced=True), random)
    assert balanced >= stages * max(tokens) * (1 - 1e-9)
    dealt = updates_seconds(tokens, 1, job, Layout(1, stages, ranks), np.random.default_rng(0))
    assert balanced <= dealt * (1 + 1e-9)


def test_virtual_stages_make_the_bubble_smaller():
    """Promise: with v chunks of each stage it is so many times smaller, also for the layout of a run."""
    tokens = [1000] * 64
    plain = TrainerConfig(pipeline_parallel=4, tokens_per_microbatch=4000)
    chunks = TrainerConfig(pipeline_parallel=4, tokens_per_microbatch=4000, virtual_stages=4)
    seconds = [
        updates_seconds(tokens, 1, only_training(1.0), layout_of(trainer), np.random.default_rng(0))
        for trainer in (replace(plain, pipeline_parallel=1), plain, chunks)
    ]
    assert (seconds[1] - seconds[0]) == pytest.approx(4 * (seconds[2] - seconds[0]))
    assert seconds[1] == pytest.approx((1 + 3 / 16) * seconds[0])


def test_chunks_hand_on_more_often():
    """Promise: so that no plan takes more chunks than pay: a stage of five hands a hidden state of 8,192
    bfloat16 on four times more, an eighth from each of eight GPUs, over the network beyond a machine."""
    model, gpu = MODELS["72B"], GPUS["H800"]
    found = chunk_exchange_seconds(model, gpu, Layout(8, 4, 2, chunks=5), DEFAULT)
    assert found == pytest.approx(4 * 8192 * 2 / 8 / gpu.nic)
    assert chunk_exchange_seconds(model, gpu, Layout(8, 4, 2), DEFAULT) == 0.0
    assert chunk_exchange_seconds(model, gpu, Layout(2, 4, 2, chunks=5), DEFAULT) < 4 * found


def test_a_planned_trainer_of_experts_pays_for_their_launches():
    """Promise: each micro-batch of each rank takes what its host launches, and context-parallel ranks share a
    token's exchanges."""
    trainer = TrainerConfig(data_parallel=8, expert_parallel=8, tokens_per_microbatch=4096)
    layout, model, gpu = layout_of(trainer), MODELS["Qwen3-30B-A3B"], GPUS["H200"]
    job = job_costs(model, gpu, 8, layout, 8, 4096, DEFAULT)
    tokens, random = [4096] * 32, np.random.default_rng(0)  # four micro-batches of each rank
    with_launches, without = (
        updates_seconds(tokens, 1, each, layout, random) for each in (job, replace(job, train_microbatch=0.0))
    )
    assert layout.experts == 8 and with_launches - without == pytest.approx(4 * job.train_microbatch)
    shared = job_costs(model, gpu, 16, replace(layout, context=2), 8, 4096, DEFAULT)
    assert shared.train_token < job.train_token


def test_the_last_stage_of_a_planned_trainer_has_the_output_layer_too():
    """Promise: as in a run, whose stages have equally many layers, and the others wait for it."""
    layout = layout_of(TrainerConfig(tensor_parallel=8, pipeline_parallel=2, data_parallel=2))
    assert layout.slowest_stage(MODELS["32B"]) == pytest.approx(1 + 0.778 / 31.98, rel=0.01)


def test_a_layout_that_shares_micro_batches():
    """Promise: a trainer with context parallelism is its layout in the simulator: twice the GPUs halve a
    token's products and attention, and pay for exchanges; the parameters' gradients have twice the
    holders."""
    trainer = TrainerConfig(
        tensor_parallel=4, context_parallel=2, data_parallel=4, tokens_per_microbatch=4096
    )
    shared, model, gpu = layout_of(trainer), MODELS["32B"], GPUS["H800"]
    alone = replace(shared, context=1)
    assert (shared.context, shared.tokens) == (2, 8192)
    two, one = (job_costs(model, gpu, 32, each, 64, 16384, DEFAULT) for each in (shared, alone))
    exchange = context_exchange_seconds(model, gpu, shared, DEFAULT)
    assert context_exchange_seconds(model, gpu, alone, DEFAULT) == 0 < exchange < 0.05 * one.train_token
    assert two.train_attention == pytest.approx(one.train_attention / 2)
    across = context_exchange_seconds(model, gpu, Layout(8, 1, 4, context=2), DEFAULT)
    assert across > exchange / 2, "beyond one machine it crosses the network"
    assert two.update > one.update


def test_a_plan_shares_micro_batches_where_nothing_else_fits():
    """Promise: Qwen3-32B with trajectories of 250,000 tokens fits 32 GPUs by context parallelism alone; a
    shorter one needs none."""
    work = WorkloadConfig(prompts_per_step=64, samples_per_prompt=16, updates_per_step=4)
    long, short = (
        fitting_trainer(MODELS["Qwen3-32B"], GPUS["H100"], 32, replace(work, max_response_tokens=n))
        for n in (250_000, 16_384)
    )
    assert long is not None and short is not None
    assert long.context_parallel == 2 and long.pack_tokens > 250_000 and long.ranks == 32
    assert short.context_parallel == 1
