"""What layers with experts, packs and uneven stages cost a trainer, in numbers that a reader can check."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.cost import engine_costs
from laminar_hpc.simulator.experts import exchange_share, expert_costs, fullest
from laminar_hpc.simulator.published_layout import layouts
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_cost import (
    Layout,
    gradient_seconds,
    job_costs,
    logprob_seconds,
    packed,
    pass_seconds,
    updates_seconds,
)

SPARSE, H100 = MODELS["Qwen3-30B-A3B"], GPUS["H100"]
ROW = 8 * 2048 * 2  # bytes of a token's copies: eight experts, a hidden state of 2,048 in bfloat16


def test_an_all_to_all_crosses_nvlink_in_a_machine_and_the_nics_beyond():
    """Of eight GPUs' rows 7/8 leave a GPU at 0.8 x 450 GB/s: 80 ns a token; of 16 GPUs' half leave the
    machine at 43 GB/s: 381 ns, while the others cross NVLink."""
    assert ROW * exchange_share(H100, 8, DEFAULT) == pytest.approx(79.6e-9, rel=0.01)
    assert ROW * exchange_share(H100, 16, DEFAULT) == pytest.approx(381e-9, rel=0.01)
    assert exchange_share(H100, 1, DEFAULT) == 0.0


def test_a_layer_with_experts_takes_two_exchanges_four_moves_and_its_launches():
    """With even loads 159 ns and 94 ns for each token and each of 48 layers, 0.263 ms for each of 16 experts;
    two GPUs of tensor parallelism halve what a token takes; the fullest rank has more rows."""
    even = replace(DEFAULT, expert_load_spread=0.0)
    found = expert_costs(SPARSE, H100, 1, 8, even)
    assert found.token == pytest.approx(48 * (159.3e-9 + 94.3e-9), rel=0.01) and found.work == 0.0
    assert found.microbatch == pytest.approx(48 * 16 * 0.263e-3)
    assert expert_costs(SPARSE, H100, 1, 16, even).microbatch == pytest.approx(found.microbatch / 2)
    assert expert_costs(SPARSE, H100, 2, 8, even).token == pytest.approx(found.token / 2)
    uneven, load = expert_costs(SPARSE, H100, 1, 8, DEFAULT), fullest(8, 128, DEFAULT)
    assert uneven.token == pytest.approx(load * found.token)
    assert uneven.work == pytest.approx((load - 1) * 29.0e9 * 8 / 128, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_the_fullest_rank_is_that_of_drawn_loads(ranks):
    """1.13 for eight ranks of 16 experts."""
    loads = np.random.default_rng(0).lognormal(0.0, DEFAULT.expert_load_spread, (4000, ranks, 128 // ranks))
    drawn = loads.sum(axis=2)
    found = (drawn.max(axis=1) / drawn.mean(axis=1)).mean()
    assert fullest(ranks, 128, DEFAULT) == pytest.approx(found, rel=0.02)
    assert fullest(8, 128, DEFAULT) == pytest.approx(1.13, abs=0.01) and fullest(1, 128, DEFAULT) == 1.0


def test_a_dense_model_has_no_costs_of_experts():
    """Nor has a micro-batch of it any cost of its own."""
    dense = MODELS["32B"]
    found = expert_costs(dense, H100, 4, 8, DEFAULT)
    assert (found.token, found.microbatch, found.work) == (0.0, 0.0, 0.0)
    job = job_costs(dense, H100, 32, Layout(4, 4, 2), 32, 4096, DEFAULT)
    assert job.train_microbatch == job.logprob_microbatch == 0.0
    assert not any(layout.packed for layout in layouts(dense, H100, 64, DEFAULT))


def test_a_machine_shares_the_experts():
    """Published recipes of 30B-A3B on H100 have one pipeline stage and eight GPUs for the experts; with all
    experts on each GPU eight stages would be needed."""
    (first, *_) = layouts(SPARSE, H100, 32, DEFAULT)
    assert (first.tensor, first.stages, first.experts, first.packed) == (1, 1, 8, True)


def test_gradients_of_experts_cross_only_between_their_copies():
    """On one machine whose eight GPUs share them only the other 1.5B parameters do, 6 bytes each over
    NVLink, 7/8 of them; on four machines three quarters of each machine's one copy cross its NICs."""
    others = SPARSE.parameters - SPARSE.expert_parameters
    one = gradient_seconds(SPARSE, H100, 8, Layout(1, 1, 8, experts=8), DEFAULT)
    assert one == pytest.approx(6 * others * 7 / 8 / (0.8 * 450e9))
    four = gradient_seconds(SPARSE, H100, 32, Layout(1, 1, 32, experts=8), DEFAULT)
    crossing = others * 31 / 32 + SPARSE.expert_parameters * 3 / 4
    assert four == pytest.approx(6 * crossing / (8 * 43e9))


# microseconds of one layer's experts by requests on an A100 PCIe of 40 GB (sgl-project/sglang, pull request
# 6825)
@pytest.mark.parametrize(("requests", "published"), [(8, 403.1), (16, 611.2), (32, 808.5), (64, 917.5)])
def test_a_batch_reads_the_experts_that_it_touches(requests, published):
    """Promise: from eight requests on within 10% of published kernels."""
    costs = engine_costs(SPARSE, replace(GPUS["A100"], hbm=1.555e12), 1, DEFAULT)
    found = costs.experts * (1 - costs.expert_miss**requests) / 48 * 1e6
    assert found == pytest.approx(published, rel=0.1)


@given(tokens=st.lists(st.integers(1, 5000), min_size=1, max_size=60), ranks=st.integers(1, 8))
def test_packs_hold_every_trajectory_once_and_no_more_than_their_room(tokens, ranks):
    """One that is longer than the room has a pack of its own; each rank gets as many packs."""
    packs = packed(tokens, 4096, ranks)
    assert sum(total for total, _ in packs) == sum(tokens) and len(packs) % ranks == 0
    assert sum(squares for _, squares in packs) == sum(n * n for n in tokens)
    assert all(total <= 4096 or squares == total * total for total, squares in packs)


def test_packs_of_a_pipeline_are_filled_up_and_others_are_not():
    """3,000 + 1,000 and 1,000 tokens: on one stage 5,000 tokens and two micro-batches, through two stages two
    micro-batches of 4,000 and a bubble of half a step."""
    flat = pass_seconds([1000, 3000, 1000], 4096, 1, 1, 1.0, 0.0, 10.0)
    staged = pass_seconds([1000, 3000, 1000], 4096, 1, 2, 1.0, 0.0, 10.0)
    assert flat == 5000 + 2 * 10 and staged == (2 * 4000 + 2 * 10) * 3 / 2
    assert pass_seconds([1000, 3000, 1000], 4096, 2, 1, 1.0, 0.0, 10.0) == 4000 + 10
    assert pass_seconds([100], 4096, 1, 1, 1.0, 0.5, 0.0) == 100 + 5000


def test_the_last_stage_has_the_output_layer_too():
    """Qwen3-32B in four stages: its output layer is 2.4% of its 32 billion parameters, so the last one takes
    7% more than the mean."""
    model = MODELS["Qwen3-32B"]
    even, uneven = (
        job_costs(model, H100, 32, Layout(4, 4, 2, even=flag), 32, 4096, DEFAULT) for flag in (True, False)
    )
    assert Layout(4, 4, 2, even=False).slowest_stage(model) == pytest.approx(1 + 3 * 0.778 / 31.98, rel=0.01)
    assert 1.05 < uneven.train_token / even.train_token < 1.08
    assert uneven.train_attention == even.train_attention


@given(tokens=st.lists(st.integers(1, 4096), min_size=1, max_size=100), ranks=st.sampled_from([1, 2, 4]))
def test_packed_updates_take_no_less_than_their_work(tokens, ranks):
    """And log-prob passes of one rank and stage take just that; micro-batches of experts come on top."""
    layout = Layout(1, 1, ranks, 4096, packed=True)
    job = job_costs(MODELS["7B"], H100, ranks, layout, ranks, 4096, DEFAULT)
    work = sum(n * job.train_token + n * n * job.train_attention for n in tokens)
    found = updates_seconds(tokens, 1, job, layout, np.random.default_rng(0))
    assert work * (1 - 1e-9) <= found <= work * ranks * (1 + 1e-9)
    passes = sum(n * job.logprob_token + n * n * job.logprob_attention for n in tokens)
    assert logprob_seconds(tokens, job, replace(layout, packed=False)) == pytest.approx(passes)
    assert ranks > 1 or math.isclose(logprob_seconds(tokens, job, layout), passes)
