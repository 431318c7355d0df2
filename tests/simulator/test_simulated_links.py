"""What passes between GPUs, in numbers that a reader can check or that are published."""

from dataclasses import replace

import pytest

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.cost import engine_costs
from laminar_hpc.simulator.links import decode_reduce, gather_seconds, global_sync_seconds
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.setup import setup
from laminar_hpc.simulator.tables import GPUS, MODELS

H100, GB200 = GPUS["H100"], GPUS["GB200"]
LARGE, HUGE = MODELS["Qwen3-235B-A22B"], MODELS["DeepSeek-V3"]


@pytest.mark.parametrize(
    ("model", "gpus", "published"), [("Qwen3-235B-A22B", 128, 5.5), ("DeepSeek-V3", 256, 14.0)]
)
def test_all_rollouts_at_once_take_weights_as_fast_as_published(model, gpus, published):
    """NeMo RL's broadcast between equal halves of H100 (NVIDIA-NeMo/RL, pull request 1379)."""
    found = global_sync_seconds(MODELS[model], H100, gpus, H100, gpus, DEFAULT)
    assert found == pytest.approx(published, rel=0.4)


def test_a_synchronisation_takes_as_long_as_the_links_of_the_poorer_side():
    """470 GB over eight NICs of 43 GB/s, of which 0.21 are reached, take 6.5 s and a flush; over two NICs
    four times as long, whichever side has them; more machines change nothing."""
    eight = global_sync_seconds(LARGE, H100, 128, H100, 128, DEFAULT) - DEFAULT.pull_overhead
    assert eight == pytest.approx(2 * LARGE.parameters / (0.21 * 8 * 43e9))
    for trainer, rollout in ((2, 64), (64, 2)):
        two = global_sync_seconds(LARGE, H100, trainer, H100, rollout, DEFAULT) - DEFAULT.pull_overhead
        assert two == pytest.approx(4 * eight)
    assert global_sync_seconds(LARGE, H100, 1024, H100, 1024, DEFAULT) == eight + DEFAULT.pull_overhead
    slow = GPUS["L40S"]
    assert global_sync_seconds(LARGE, H100, 128, slow, 128, DEFAULT) - DEFAULT.pull_overhead == pytest.approx(
        eight * 43 / 11
    )


def test_inside_one_machine_weights_cross_nvlink():
    """7B between four and four GPUs at 0.21 of 450 GB/s: verl has 0.12 s without its checkpoint engine."""
    found = global_sync_seconds(MODELS["7B"], H100, 4, H100, 4, DEFAULT) - DEFAULT.pull_overhead
    assert found == pytest.approx(15.2e9 / (0.21 * 450e9), rel=0.01) and found < 0.2


def test_a_run_synchronises_over_its_own_links():
    """A trainer of two GPUs holds every rollout up four times as long as one of eight."""

    def seconds(trainer_gpus: int) -> float:
        made = setup(
            PIPELINES["one_step"],
            MODELS["7B"],
            H100,
            trainer_gpus,
            [(H100, 64, 1, None)],
            WorkloadConfig(),
            DEFAULT,
            steps=2,
            warmup_steps=1,
        )
        return made.engines[0].costs.global_sync - DEFAULT.pull_overhead

    assert seconds(2) == pytest.approx(4 * seconds(8)) and seconds(16) == seconds(8)


def test_an_all_reduce_beyond_a_machine_is_the_networks():
    """46 us between two machines, 17 us more for each doubling, and 20 GB/s: 64 requests of 235B, half a
    megabyte, take 72 us where one machine takes 13. A small message between two machines of H20 takes 46 us
    (NVIDIA/nccl, issue 1244)."""
    assert decode_reduce(LARGE, H100, 1, DEFAULT) == (0.0, 0.0)
    near, far, further = (decode_reduce(LARGE, H100, n, DEFAULT) for n in (8, 16, 64))
    assert near[0] == DEFAULT.decode_allreduce_seconds
    assert far[0] == pytest.approx(46e-6) and further[0] == pytest.approx((46 + 2 * 17) * 1e-6)
    assert far[0] + 64 * far[1] == pytest.approx(72e-6, rel=0.02)
    assert near[0] + 64 * near[1] == pytest.approx(12.5e-6, rel=0.02)


def test_a_message_of_a_megabyte_takes_what_is_published():
    """203 us for 1 MiB and 365 us for 4 MiB over two machines, on a network whose smallest takes 123 us
    (lessizzmore/create-a3mega-ztan-fork, ztan-NCCL-test-result)."""
    cloud = replace(DEFAULT, network_allreduce_seconds=123e-6)
    latency, request = decode_reduce(LARGE, H100, 16, cloud)
    for size, seconds in ((2**20, 203e-6), (2**22, 365e-6)):
        assert latency + request * size / (2 * LARGE.hidden) == pytest.approx(seconds, rel=0.15)


def test_nvlink_that_joins_a_rack_spares_the_network():
    """Promise: sixteen GB200 of four machines reduce as one machine does."""
    assert GB200.domain == 72 and GB200.machine == 4
    assert decode_reduce(LARGE, GB200, 16, DEFAULT)[0] == DEFAULT.decode_allreduce_seconds
    inside, across = (engine_costs(LARGE, gpu, 16, DEFAULT) for gpu in (GB200, replace(GB200, nvlink_gpus=0)))
    assert across.overhead - inside.overhead > 188 * 30e-6


@pytest.mark.parametrize(
    ("model", "published"), [("Llama-3.1-70B", 14 - 5), ("Qwen3-235B-A22B", 30.4 - 13.1)]
)
def test_weights_of_a_colocated_trainer_cross_each_gpus_own_link(model, published):
    """Beyond 8B and 30B-A3B: refits of NeMo RL (NVIDIA-NeMo/RL, issue 959 and pull request 3294)."""
    less = MODELS["Llama-3.1-8B" if "Llama" in model else "Qwen3-30B-A3B"]
    found = gather_seconds(MODELS[model], H100, 64, DEFAULT) - gather_seconds(less, H100, 64, DEFAULT)
    assert found == pytest.approx(published, rel=0.4)
    assert gather_seconds(HUGE, H100, 256, DEFAULT) == gather_seconds(HUGE, H100, 512, DEFAULT)
    assert gather_seconds(less, H100, 8, DEFAULT) < 0.4
