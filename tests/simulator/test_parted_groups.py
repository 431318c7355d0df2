"""Moves that part the samples of a prompt: what a replica may do by itself then (simulator/ahead.py)."""

import dataclasses

import pytest

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.setup import setup
from laminar_hpc.simulator.tables import GPUS, MODELS

REPLICAS, KV_TOKENS, CONCURRENT = 4, 212_000, 64


def rate(repack: str, seed: int) -> float:
    """Tokens generated per second; a quarter of all responses reach the limit, and KV caches are full."""
    gpu, model = GPUS["H800"], MODELS["32B"]
    workload = WorkloadConfig(
        mean_response_tokens=6000,
        max_response_tokens=16384,
        sigma=1.69,
        prompts_per_step=64,
        samples_per_prompt=16,
    )
    rules = dataclasses.replace(PIPELINES["laminar_unbounded"], repack=repack)
    rollouts, times = [(gpu, 4 * REPLICAS, 4, None)], {"steps": 4, "warmup_steps": 1, "seed": seed}
    found = setup(rules, model, gpu, 16, rollouts, workload, DEFAULT, max_concurrent=CONCURRENT, **times)
    engines = tuple(
        dataclasses.replace(kind, capacity=KV_TOKENS, saturation=CONCURRENT) for kind in found.engines
    )
    return simulate(dataclasses.replace(found, engines=engines)).figures["generated_per_second"]


@pytest.mark.parametrize("seed", range(3))
def test_a_replica_whose_last_request_ends_before_its_group_asks_for_work(seed):
    """The rest of the group is elsewhere: the replica does not stand idle for good."""
    off = rate("off", seed)
    assert rate("kv", seed) >= 0.98 * off
    assert rate("auto", seed) >= 0.98 * off
