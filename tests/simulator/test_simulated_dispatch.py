"""Which prompts go out first, in the simulator: the controller's policy, and what it brings where lengths
have a tail and prompts come again."""

import dataclasses
from collections import Counter

import pytest

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import Simulation, simulate
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.setup import SimulationSetup, setup
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.tracker import SimulatedGroup


def run_of(dispatch: str, prompts: int, seed: int = 0) -> SimulationSetup:
    """Four replicas, 16 groups of 8 in each local batch, lengths from a dozen tokens to 8,192."""
    work = WorkloadConfig(
        prompts=prompts,
        prompts_per_step=64,
        samples_per_prompt=8,
        updates_per_step=2,
        mean_response_tokens=1200,
        max_response_tokens=8192,
        sigma=1.69,
    )
    rules = dataclasses.replace(PIPELINES["laminar_no_repack"], dispatch=dispatch)
    gpu, settings = GPUS["H800"], {"steps": 14, "warmup_steps": 5, "max_concurrent": 16, "seed": seed}
    return setup(rules, MODELS["7B"], gpu, 2, [(gpu, 4, 1, None)], work, DEFAULT, **settings)


def test_replicas_that_share_the_long_prompts_are_faster() -> None:
    """Mean of two seeds; a pass is two steps, so all that is measured is of prompts that came before."""
    rates = [
        [simulate(run_of(way, 128, seed)).figures["tokens_per_second"] for seed in range(2)]
        for way in ("in_order", "longest_first")
    ]
    assert sum(rates[1]) > 1.03 * sum(rates[0])


def test_prompts_that_never_come_again_go_out_in_order() -> None:
    """Nothing is known of them, so the run is the same to the last event."""
    one, other = (simulate(run_of(way, 0)).figures for way in ("in_order", "longest_first"))
    assert one == pytest.approx(other, nan_ok=True)


def test_each_draw_is_granted_once() -> None:
    """Whatever the order: what was granted and what is left of the last block are the first draws, and each
    of the 100 prompts has been granted as often as any other, or once more."""
    run = Simulation(run_of("longest_first", 100))
    tracker, granted = run.tracker, [group.group_id for group in run.tracker.live.values()]
    new_group = tracker.new_group

    def watched(weight_step: int, local_batch: int = 1) -> SimulatedGroup:
        group = new_group(weight_step, local_batch)
        granted.append(group.group_id)
        return group

    tracker.new_group = watched  # type: ignore[method-assign]
    run.clock.run()
    left = tracker._draws.left
    assert granted != sorted(granted) and len(granted) > 14 * 64
    assert sorted(granted + left) == list(range(len(granted) + len(left)))
    counts = Counter(tracker.workload.prompt(draw) for draw in granted)
    assert len(counts) == 100 and max(counts.values()) - min(counts.values()) <= 1
