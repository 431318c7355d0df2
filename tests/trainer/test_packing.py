"""Where trajectories go: mini-batches, ranks, micro-batches; and the padded buckets of the attention."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import even_tokens, known_models
from laminar_hpc.trainer.megatron.attention import make_buckets
from laminar_hpc.trainer.step.packing import (
    pack,
    plan_microbatches,
    split_minibatches,
    split_ranks,
    spread,
    work,
)

lengths_within = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(lengths_within, st.integers(1, 4))
def test_plan_is_complete_within_budget_and_even(lengths: list[int], ranks: int) -> None:
    """Every trajectory is in one place, no micro-batch exceeds the budget, and all ranks have the same number
    of them."""
    plan = plan_microbatches(lengths, ranks, budget=50)
    assert sorted(i for rank in plan for part in rank for i in part) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in part) <= 50 for rank in plan for part in rank)
    assert len({len(rank) for rank in plan}) == 1


@given(lengths_within, st.integers(2, 4))
def test_ranks_are_balanced_by_tokens(lengths: list[int], ranks: int) -> None:
    """No two ranks differ by more than the longest trajectory."""
    tokens = [sum(lengths[i] for i in part) for part in split_ranks(lengths, ranks)]
    assert max(tokens) - min(tokens) <= max(lengths)


def test_pack_fills_the_gaps() -> None:
    """First-fit decreasing finds the three packs that these need."""
    assert [sorted(p) for p in pack([6, 5, 5, 4, 3, 7], [0, 1, 2, 3, 4, 5], 10)] == [[4, 5], [0, 3], [1, 2]]


@pytest.mark.parametrize("ranks", [8, 32])
def test_ranks_wait_little_for_the_slowest(ranks: int) -> None:
    """Promise: with 512 trajectories of log-normal length (sigma 1.7, at most 32K tokens) and attention that
    counts with their square, ranks are idle for less than 5 % of the slowest one's time; balanced by tokens
    alone they wait longer."""
    even = even_tokens(known_models()["Qwen2.5-7B"])

    def idle(lengths: list[int], balance: float) -> float:
        plan = plan_microbatches(lengths, ranks, 33_792, balance)
        times = [sum(work(lengths[i], even) for part in parts for i in part) for parts in plan]
        return 1 - sum(times) / ranks / max(times)

    draw = random.Random(0)
    batches = [
        [256 + min(32_768, round(draw.lognormvariate(math.log(1097), 1.7))) for _ in range(512)]
        for _ in range(4)
    ]
    by_work, by_tokens = (sum(idle(batch, b) for batch in batches) / 4 for b in (even, math.inf))
    assert by_work < 0.05 and by_work < by_tokens


def test_attention_takes_as_much_as_all_else_at_the_even_length() -> None:
    """Qwen2.5-7B: 7.07e9 parameters beside the embedding, over 28 layers of 28 heads of 128."""
    even = even_tokens(known_models()["Qwen2.5-7B"])
    assert even == pytest.approx(7.07e9 / (28 * 28 * 128), rel=0.01)
    assert work(round(even), even) == pytest.approx(2 * even, rel=1e-4)


@given(lengths_within, st.integers(1, 8))
def test_packs_of_a_rank_are_even(lengths: list[int], more: int) -> None:
    """Promise: where the budget allows it no two packs differ by more than the longest trajectory, so that
    pipeline stages, which fill them up to the largest, compute little for nothing."""
    members = list(range(len(lengths)))
    fewest = len(pack(lengths, members, 50))
    packs = spread(lengths, members, 50, fewest + more)
    tokens = [sum(lengths[i] for i in part) for part in packs]
    assert sorted(i for part in packs for i in part) == members and len(packs) == fewest + more
    assert max(tokens) <= 50
    if max(sum(lengths) / len(packs) + max(lengths), 0) <= 50:
        assert max(tokens) - min(tokens) <= max(lengths)


def test_a_trajectory_beyond_the_budget_is_named() -> None:
    """The error says which setting to raise."""
    with pytest.raises(LaminarError, match="tokens_per_microbatch=10; raise it"):
        pack([11], [0], 10)


def test_minibatches_depend_on_seed_and_step_alone() -> None:
    """A resumed run splits a batch as the first run did; other steps are split differently."""
    assert split_minibatches(8, 2, 3, 5) == split_minibatches(8, 2, 3, 5)
    assert split_minibatches(64, 2, 3, 5) != split_minibatches(64, 2, 3, 6)
    parts = split_minibatches(9, 2, 0, 0)
    assert sorted(map(len, parts)) == [4, 5] and sorted([*parts[0], *parts[1]]) == list(range(9))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_buckets_gather_and_scatter_are_inverse(lengths: list[int]) -> None:
    """Each token has one padded place, in order, in a row of its own sequence; the other places, a quarter at
    most, are padding."""
    buckets = make_buckets(lengths, torch.device("cpu"))
    total, padded = sum(lengths), sum(n * width for n, width in buckets.shapes)
    assert buckets.gather[buckets.scatter].tolist() == list(range(total))
    assert sorted([*buckets.scatter.tolist(), *buckets.padding.tolist()]) == list(range(padded))
    assert padded <= 1.25 * total
    starts = {sum(lengths[:i]) for i in range(len(lengths))}
    at = 0
    for rows, width in buckets.shapes:
        assert all(int(buckets.gather[at + row * width]) in starts for row in range(rows))
        at += rows * width
