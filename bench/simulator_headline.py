"""Laminar's headline (arXiv 2510.12633) for bench/simulator.py: its speed-ups over other pipelines beside
simulated ones, and experiments on what differs. No constant is fitted to any of them."""

import dataclasses
import statistics
from collections.abc import Iterable

from simulator_papers import row

from laminar_hpc.simulator.constants import SIGMA_DORA
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.schema import SimulationConfig, WorkloadConfig
from laminar_hpc.simulator.sweep import point, split
from laminar_hpc.simulator.tables import MODELS

OURS = "laminar_unbounded"
SCALES = {"7B": (16, 64, 256), "32B": (32, 128, 512), "72B": (64, 256, 1024)}
TOOLS_SCALES = {"7B": (16, 64, 256)}
# Mean and maximum of the speed-ups over each, over all models and scales of the paper.
MATH = {"sync": (2.56, 5.48), "one_step": (1.98, None), "stream": (1.93, None), "partial": (1.39, None)}
TOOLS = {"sync": (2.62, 5.42)}
LARGEST = 3.34  # mean at the largest scales; over whom is not known to us
# Published shares of the trainer: 72B on 1,024 and 32B on 128.
SPLITS = {
    ("72B", 1024): {OURS: 0.75, "one_step": 0.25, "stream": 0.25, "partial": 0.625},
    ("32B", 128): dict.fromkeys((OURS, "one_step", "stream", "partial"), 0.5),
}
SLOW_SYNC = 4e9 / 344e9  # of a machine's links, eight NICs of 43 GB/s
# What the paper leaves open and constants that are uncertain, one at a time: (settings, workload, constants).
CHANGES: dict[str, tuple[dict, dict, dict]] = {
    "as above": ({}, {}, {}),
    "engines with CUDA graphs": ({"cuda_graphs": True}, {}, {}),
    "all engines vLLM's": ({"engine": "vllm"}, {}, {}),
    "mean of 4,000 tokens": ({}, {"mean_response_tokens": 4000}, {}),
    "mean of 6,000 tokens, as the repack ablation": ({}, {"mean_response_tokens": 6000}, {}),
    "heavier tail: DORA's sigma of 1.69": ({}, {"sigma": SIGMA_DORA}, {}),
    "no handling of the padded batch": ({}, {}, {"batch_handling": 0.0, "overlapped_handling": 0.0}),
    "replicas of equal speed": ({}, {}, {"replica_speed_spread": 0.0}),
    "replicas that differ by 6%": ({}, {}, {"replica_speed_spread": 0.06}),
    "global synchronisation at 4 GB/s": ({}, {}, {"global_sync_share": SLOW_SYNC}),
    "at 103 GB/s, as a relay's push": ({}, {}, {"global_sync_share": 103e9 / 344e9}),
    "prefill at a quarter of its rate": ({}, {}, {"prefill_mfu": 0.57 / 4}),
    "trainer 20% slower": ({}, {}, {"train_kernel_efficiency": 0.4}),
    "trainer 20% faster": ({}, {}, {"train_kernel_efficiency": 0.6}),
}


def configuration(model: str, gpus: int, work: WorkloadConfig) -> SimulationConfig:
    """CUDA graphs as in conf/simulation/experiment/laminar.yaml."""
    known = SPLITS.get((model, gpus), {})
    return SimulationConfig(
        model=model, steps=5, warmup_steps=2, splits=known, workload=work, cuda_graphs=False
    )


def speedups(
    rows: list[dict],
    part: str,
    work: WorkloadConfig,
    scales: dict[str, tuple[int, ...]],
    published: dict[str, tuple[float, float | None]],
) -> dict[str, float]:
    """A row for each model, scale and pipeline; mean, maximum and mean at the largest scales beside the
    published ones."""
    ratios: dict[str, list[float]] = {name: [] for name in published}
    largest: dict[str, list[float]] = {name: [] for name in published}
    partial: list[tuple[SimulationConfig, int, float, int]] = []
    for model, gpus in ((model, n) for model, counts in scales.items() for n in counts):
        config = configuration(model, gpus, work)
        ours, trainer = _best(config, OURS, gpus)
        rows.append(row(part, f"{model} {gpus}: Laminar, tokens/s", None, ours, f"train {trainer}"))
        for name in published:
            rate, other = _best(config, name, gpus)
            ratios[name].append(ours / rate)
            note = f"{ours:,.0f} / {rate:,.0f} tokens/s; train {trainer} / {other}"
            rows.append(row(part, f"{model} {gpus}: over {name}", None, ours / rate, note))
            if name == "partial":
                partial.append((config, gpus, ours, other))
            if gpus == max(scales[model]):
                largest[name].append(ours / rate)
    for name, (mean, most) in published.items():
        rows.append(row(part, f"mean over {name}", mean, statistics.fmean(ratios[name])))
        if most:
            rows.append(row(part, f"max over {name}", most, max(ratios[name])))
    if published is MATH:
        every = [ratio for found in largest.values() for ratio in found]
        for whom, found in (("sync", largest["sync"]), ("all", every)):
            rows.append(row(part, f"largest scales: mean over {whom}", LARGEST, statistics.fmean(found)))
        _areal(rows, partial)
    return {f"{part}_speedup_over_{name}": statistics.fmean(found) for name, found in ratios.items()}


def _areal(rows: list[dict], found: list[tuple[SimulationConfig, int, float, int]]) -> None:
    """What could have made AReaL slower than here, one at a time and together, over all clusters with the
    splits of before. `found`: settings, GPUs, Laminar's tokens/s, the GPUs of AReaL's trainer."""
    sync, prefill = {"global_sync_share": SLOW_SYNC}, {"prefill_mfu": 0.57 / 4}
    PIPELINES["partial_waits"] = dataclasses.replace(PIPELINES["partial"], overlapped=False)
    changes: dict[str, tuple[str, dict, float | None]] = {
        "as above": ("partial", {}, None),
        "a bound of one step": ("partial", {"max_staleness": 1}, None),
        "a bound of two steps": ("partial", {"max_staleness": 2}, None),
        "batch handled while its trainer waits": ("partial_waits", {}, None),
        "synchronisation at 4 GB/s": ("partial", {"constants": sync}, None),
        "prefill at a quarter": ("partial", {"constants": prefill}, None),
        "five eighths train at every scale": ("partial", {}, 0.625),
        "half of the GPUs train at every scale": ("partial", {}, 0.5),
        "half as many requests at a time": ("partial", {"max_concurrent": 128}, None),
        "synchronisation and prefill": ("partial", {"constants": sync | prefill}, None),
        "handling, synchronisation and prefill": ("partial_waits", {"constants": sync | prefill}, None),
        "one step and handling": ("partial_waits", {"max_staleness": 1}, None),
        "one step and synchronisation": ("partial", {"max_staleness": 1, "constants": sync}, None),
    }
    for name, (pipeline, settings, share) in changes.items():
        ratios = []
        for config, gpus, ours, searched in found:
            tensor = MODELS[config.model].tensor_parallel
            trainer = searched if share is None else round(gpus * share / tensor) * tensor
            changed = dataclasses.replace(config, **settings)
            figures = point(changed, pipeline, gpus, trainer, config.steps).figures
            ratios.append(ours / figures["tokens_per_second"])
        note = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append(row("headline AReaL", f"mean over AReaL, {name}", 1.39, statistics.fmean(ratios), note))


def _best(config: SimulationConfig, name: str, gpus: int) -> tuple[float, int]:
    """Tokens/s and the trainer's GPUs: of the published split, else of the best of all."""
    trainer = split(config, name, gpus)
    return point(config, name, gpus, trainer, config.steps).figures["tokens_per_second"], trainer


def assumptions(rows: list[dict]) -> None:
    """Each change alone, at the two clusters whose splits are published: what it does to each speed-up."""
    for model, gpus in SPLITS:
        base = configuration(model, gpus, WorkloadConfig())
        for name, (settings, work, constants) in CHANGES.items():
            workload = dataclasses.replace(base.workload, **work)
            changed = dataclasses.replace(base, **settings, workload=workload, constants=constants)
            ours, _ = _best(changed, OURS, gpus)
            for over in MATH:
                rate, _ = _best(changed, over, gpus)
                what, note = f"{model} {gpus}, {name}: over {over}", f"Laminar {ours:,.0f} tokens/s"
                rows.append(row("assumptions", what, None, ours / rate, note))


def table(rows: Iterable[dict]) -> str:
    """The headline as the paper has it: a line per model and scale, the published figures below."""
    found = {row["what"]: row for row in rows if row["part"] == "headline"}
    lines = [f"{'speed-up of Laminar over':<36}{'tokens/s':>10}" + "".join(f"{name:>10}" for name in MATH)]
    for model, counts in SCALES.items():
        for gpus in counts:
            rate = found[f"{model} {gpus}: Laminar, tokens/s"]
            known = "published" if (model, gpus) in SPLITS else "searched"
            ratios = [found[f"{model} {gpus}: over {name}"]["simulated"] for name in MATH]
            lines.append(
                f"{f'{model} on {gpus} ({known} splits)':<36}{rate['simulated']:>10,.0f}" + _cells(ratios)
            )
    for title, key in (("mean", "simulated"), ("mean, published", "published"), ("difference", "error")):
        values = [found[f"mean over {name}"][key] for name in MATH]
        lines.append(f"{title:<46}" + (_cells(values) if key != "error" else "".join(map(_share, values))))
    for what in ("max over sync", "largest scales: mean over sync", "largest scales: mean over all"):
        one = found[what]
        lines.append(
            f"{what:<46}{one['simulated']:>10.2f}  published {one['published']:.2f} ({one['error']:+.0%})"
        )
    return "\n".join(lines)


def _cells(values: list[float]) -> str:
    return "".join(f"{value:>10.2f}" for value in values)


def _share(value: float) -> str:
    return f"{value:>+10.0%}"
