"""Which assumptions each headline of the simulator rests on, for bench/simulator.py: every uncertain constant
one standard deviation less and more (simulator/uncertainty.py), and all of them drawn together."""

import dataclasses

from simulator_headline import configuration
from simulator_papers import over_seeds, repack, row

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.schema import SimulationConfig, WorkloadConfig
from laminar_hpc.simulator.settings import load_simulation
from laminar_hpc.simulator.uncertainty import SPREAD, deviated, draw, interval

DRAWS = 12
# of other places, several trainers, adapters, experts, latent or linear attention, and engines of several
# machines, which no headline has
ELSEWHERE = (
    "wan_streams",
    "changed_bytes_share",
    "group_exchange_bytes_per_second",
    "decode_adapter_share",
    "decode_latent_layer_seconds",
    "decode_attention_efficiency",
    "decode_state_efficiency",
    "eager_expert_layer_seconds",
    "expert_launch_seconds",
    "expert_load_spread",
    "network_allreduce_seconds",
    "network_hop_seconds",
    "network_allreduce_bytes_per_second",
)


def headlines(constants: dict[str, float]) -> dict[str, float]:
    """Every headline with these constants; one seed, short runs."""

    def rate(config: SimulationConfig, name: str) -> float:
        changed = dataclasses.replace(config, constants=config.constants | constants)
        return over_seeds(changed, name, config.gpus[0], (0,))["tokens_per_second"]

    large = dataclasses.replace(configuration("72B", 1024, WorkloadConfig()), gpus=[1024])
    dora = dataclasses.replace(load_simulation("dora", []), gpus=[128], steps=5, warmup_steps=2)
    ablation = dataclasses.replace(
        load_simulation("repack", []), steps=5, warmup_steps=2, constants=constants
    )
    ours, found = rate(large, "laminar_unbounded"), repack([], ablation, (0,))
    return {
        "over sync, 72B on 1,024": ours / rate(large, "sync"),
        "over one-step, 72B on 1,024": ours / rate(large, "one_step"),
        "over AReaL, 72B on 1,024": ours / rate(large, "partial"),
        "Laminar's tokens/s, 72B on 1,024": ours,
        "DORA's tokens/s, 128 GPUs": rate(dora, "dora"),
        "repack gain": found["repack_gain"],
        "KV use without repack": found["kv_use_without"],
    }


def sensitivity(rows: list[dict]) -> None:
    """A row for each constant, direction and headline, then each headline's range over the draws."""
    base = headlines({})
    for name in (name for name in SPREAD if name not in ELSEWHERE):
        for value in (deviated(name, -1.0), deviated(name, 1.0)):
            factor = value / getattr(DEFAULT, name)
            for key, found in headlines({name: value}).items():
                rows.append(row("sensitivity", f"{name} x {factor:.3f}: {key}", base[key], found))
    drawn = [headlines(draw(number, 0)) for number in range(DRAWS)]
    for key, middle in base.items():
        low, high = interval([found[key] for found in drawn], middle)
        note = f"{low:,.3g} to {high:,.3g}"
        rows.append(row("ranges", key, None, middle, note) | {"low": low, "high": high})
