"""The planner's search: what it finds, what it may leave out, and what it says of that."""

import math

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.simulator import plan
from laminar_hpc.simulator.divisions import Candidate, candidates, describe, price
from laminar_hpc.simulator.plan import evaluate, planned_lengths, rates, search
from laminar_hpc.simulator.plan_command import expectations
from laminar_hpc.simulator.plan_files import rollout_machines
from laminar_hpc.simulator.settings import load_plan, load_simulation

SMALL = [
    "workload.prompts_per_step=16",
    "workload.samples_per_prompt=4",
    "workload.updates_per_step=2",
    "steps=5",
    "warmup_steps=2",
]
LONG = [
    *SMALL,
    "pools=[{gpu: H100, count: 16}]",
    "workload.prompts_per_step=32",
    "workload.max_response_tokens=65536",
    "workload.mean_response_tokens=48000",
]
POOLS = [
    "{gpu: H100, count: 8}",
    "{gpu: H100, count: 16}",
    "{gpu: L40S, count: 8}",
    "{gpu: H800, count: 8}, {gpu: H20, count: 4}",
    "{gpu: H800, count: 4}, {gpu: A100, count: 8, preemptible: true}",
]


@st.composite
def questions(draw):
    """Words of a question about a small cluster."""
    longest = draw(st.sampled_from([512, 4096, 24000]))
    mean = max(2, int(longest * draw(st.sampled_from([0.05, 0.2, 0.6]))))
    return [
        *SMALL,
        f"pools=[{draw(st.sampled_from(POOLS))}]",
        f"model={draw(st.sampled_from(['0.5B', '1.5B', '3B']))}",
        f"max_staleness={draw(st.sampled_from([0, 1, 3]))}",
        f"max_concurrent={draw(st.sampled_from([8, 256]))}",
        f"objective={draw(st.sampled_from(['throughput', 'cost']))}",
        f"workload.max_response_tokens={longest}",
        f"workload.mean_response_tokens={mean}",
        f"workload.growth={draw(st.sampled_from([-0.5, 0.0, 1.0]))}",
        f"seed={draw(st.integers(0, 3))}",
        "trainer_busy=0",
    ]


def all_scores(config) -> dict[Candidate, float]:
    """Each division simulated; none exceeds its bound."""
    found, lengths = {}, planned_lengths(config)
    for candidate in candidates(config):
        rate = evaluate(config, candidate)["tokens_per_second"]
        assert rate <= rates(config, candidate, lengths)[0] * (1 + 1e-9), describe(config, candidate)
        per = 1.0 if config.objective == "throughput" else 3600 / price(config, candidate)
        found[candidate] = rate * per
    return found


def check_that_the_best_is_found(words):
    config = load_plan("node", [*words, "budget_seconds=100000"])
    found, scores = search(config), all_scores(config)
    assert found.ended and math.isclose(found.best.score, max(scores.values()))
    assert found.simulated + found.excluded == found.candidates == len(scores)


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(words=questions())
def test_a_search_that_has_ended_has_the_best_of_all(words):
    """Promise: with a budget that is not used up the plan is the best of all divisions simulated one by one,
    and what it left out is excluded by a bound that no simulation exceeds."""
    check_that_the_best_is_found(words)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
@given(words=questions())
def test_many_searches_that_have_ended_have_the_best_of_all(words):
    """The same promise, of many questions."""
    check_that_the_best_is_found(words)


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(words=questions())
def test_estimates_lead_to_the_best(words):
    """Promise: a search that estimates end has a plan within 10% of the best, and does not call it the best
    where it has left any out."""
    config = load_plan("node", words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_THOROUGH_SECONDS", 0.0)
        found = search(config)
    assert found.best.score >= 0.9 * max(all_scores(config).values())
    assert found.ended or "left out: estimates, which may be wrong" in found.rest


def test_a_trainer_may_take_a_part_of_a_machine():
    """Promise: two machines whose rollouts are the narrower side train on a part of one of them, beside
    replicas."""
    config = load_plan("node", LONG)
    whole = max(
        evaluate(config, candidate)["tokens_per_second"]
        for candidate in candidates(config)
        if candidate.trainer_gpus == 8
    )
    found = search(config)
    best = found.best.candidate
    assert found.best.score > 1.1 * whole and best.trainer_gpus < 8
    apart, beside = rollout_machines(config, best)
    assert beside.beside and not apart.beside
    assert sum(beside.processes) * best.tensor_parallel + best.trainer_gpus <= 8
    assert "no other can be better" not in "\n".join(expectations(config, found))


def test_what_was_searched_is_said(monkeypatch):
    """Promise: Ctrl-C, a budget that is over and a bound each have words of their own, with numbers that add
    up; Ctrl-C before the first simulation ends the command."""
    config = load_plan("node", [*SMALL, "model=1.5B", "budget_seconds=0.000001"])
    found = search(config)
    assert found.simulated == 1 and not found.ended
    assert (
        f"{found.candidates - 1 - found.excluded} left out: the 1e-06 s of budget_seconds are over"
        in found.rest
    )
    config = load_plan("node", [*SMALL, "model=1.5B", "budget_seconds=1000"])
    asked = []

    def interrupted(config, candidate):
        asked.append(candidate)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return evaluate(config, candidate)

    monkeypatch.setattr(plan, "evaluate", interrupted)
    said = list[str]()
    found = search(config, said.append)
    assert found.simulated == len(said) == 2 and "left out: Ctrl-C" in found.rest
    assert said[0].startswith(f"1/{found.candidates} train on ") and "the best so far" in said[0]
    asked[:] = [None, None]
    with pytest.raises(KeyboardInterrupt):
        search(config)


def test_experiments_and_questions_of_ones_own(tmp_path):
    """Promise: --config-dir takes a user's own files beside the shipped ones, and lists both."""
    for folder, text in (("experiment", "gpus: [16]"), ("question", "pools: [{gpu: H100, count: 16}]")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ours.yaml").write_text(
            f"# @package _global_\nname: ours\nmodel: 1.5B\n{text}\n"
        )
    own = ["--config-dir", str(tmp_path)]
    assert load_simulation("ours", own).gpus == [16] and load_plan("ours", own).pools[0].count == 16
    assert load_simulation("small", own).name == "small"
    with pytest.raises(
        LaminarError, match=rf"no simulation 'our' \(did you mean ours\?\): .*; ours in {tmp_path}"
    ):
        load_simulation("our", own)
