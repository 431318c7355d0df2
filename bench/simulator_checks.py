"""The simulator's costs beside published measurements, for bench/simulator.py."""

import dataclasses

import numpy as np
from simulator_papers import row

from laminar_hpc.simulator.constants import DEFAULT, MEAN_RESPONSE_TOKENS_DORA, SIGMA_DORA
from laminar_hpc.simulator.cost import engine_costs
from laminar_hpc.simulator.links import gather_seconds
from laminar_hpc.simulator.published_layout import trainer_layout
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_cost import Layout, colocated, job_costs, updates_seconds
from laminar_hpc.simulator.workload import Workload

# (model, GPU, tensor parallel, CUDA graphs, requests, tokens of each, tokens/s, source)
H100_7B = ((1, 131), (32, 5163), (64, 9507), (96, 13588), (128, 16998))  # requests, tokens/s
_H100 = "7B on H100; fitted"
_QWEN = "Qwen2.5 speed benchmark, vLLM 0.6.3"
_SGLANG = "Qwen3 speed benchmark, SGLang"
DECODE = [
    *(("7B", "H100", 1, True, n, 200, rate, _H100) for n, rate in H100_7B),
    ("72B", "H100", 2, True, 1, 600, 32.4, "tenstorrent/tt-inference-server, issue 143"),
    ("0.5B", "A100", 1, True, 1, 1025, 311.55, _QWEN),
    ("1.5B", "A100", 1, True, 1, 1025, 183.33, _QWEN),
    ("7B", "A100", 1, True, 1, 1025, 84.28, _QWEN),
    ("7B", "A100", 1, True, 1, 31744, 70.33, _QWEN),
    ("14B", "A100", 1, True, 1, 1025, 46.30, _QWEN),
    ("32B", "A100", 1, False, 1, 1025, 22.13, _QWEN),
    ("32B", "A100", 2, True, 1, 31744, 31.82, _QWEN),
    ("72B", "A100", 4, True, 1, 1025, 31.37, _QWEN),
    ("Qwen3-8B", "H20", 1, True, 1, 1025, 81.73, _SGLANG),
    ("Qwen3-32B", "H20", 1, True, 1, 1025, 20.72, _SGLANG),
    ("Qwen3-30B-A3B", "H100", 1, True, 10, 2560, 758.7, "vllm-project/vllm, pull request 23151"),
]
# Microseconds of one layer's experts of Qwen3-30B-A3B by requests, on an A100 PCIe of 40 GB
# (sgl-project/sglang, pull request 6825)
EXPERTS = {1: 109.2, 2: 159.8, 4: 268.9, 8: 403.1, 16: 611.2, 24: 730.2, 32: 808.5, 48: 886.0, 64: 917.5}


def decode(rows: list[dict]) -> dict[str, float]:
    """Seconds of a decode step. The limit of 15% is for the first table, by batch size."""
    errors = []
    for model, gpu, tensor, graphs, requests, context, rate, source in DECODE:
        costs = engine_costs(MODELS[model], GPUS[gpu], tensor, DEFAULT, graphs)
        found = costs.step(requests, requests * context) * 1e3
        what = f"{model}, {tensor} x {gpu}, {requests} x {context:,} tokens: ms per step"
        rows.append(row("decode", what, requests / rate * 1e3, found, source))
        if source == _H100:
            errors.append(abs(rows[-1]["error"]))
    model, gpu = MODELS["Qwen3-30B-A3B"], dataclasses.replace(GPUS["A100"], hbm=1.555e12)
    costs = engine_costs(model, gpu, 1, DEFAULT)
    for requests, published in EXPERTS.items():
        found = costs.experts * (1.0 - costs.expert_miss**requests) / model.layers * 1e6
        what = f"experts of a layer of 30B-A3B, A100 PCIe, {requests} requests: us"
        rows.append(row("decode", what, published, found, "reads alone"))
    return {"decode_worst_error": max(errors)}


def _step(
    model: str, gpu: str, gpus: int, work: WorkloadConfig, layout: Layout, shared: bool = False
) -> tuple[float, float]:
    """Seconds of the updates, and of log-probs with the handling of the batch. `shared`: with engines."""
    draw = Workload(work, 0, 1)
    groups = range(work.prompts_per_step)
    tokens = [n + work.prompt_tokens for index in groups for n in draw.lengths(index)]
    costs = job_costs(MODELS[model], GPUS[gpu], gpus, layout, gpus, work.max_response_tokens, DEFAULT)
    costs = colocated(costs, DEFAULT) if shared else costs
    updates = updates_seconds(tokens, work.updates_per_step, costs, layout, np.random.default_rng(0))
    passes = sum(tokens) * costs.logprob_token + sum(n * n for n in tokens) * costs.logprob_attention
    return updates + work.updates_per_step * costs.update, passes + len(tokens) * costs.handling / 2


def trainer(rows: list[dict]) -> dict[str, float]:
    """DORA's steps without their rollout, absolute; verl's on H20 (docs/advance/fully_async.md), whose
    lengths are not published, as ratios between numbers of GPUs."""
    errors = []
    work = WorkloadConfig(
        mean_response_tokens=MEAN_RESPONSE_TOKENS_DORA, max_response_tokens=30720, sigma=SIGMA_DORA
    )
    for gpus, seconds in ((64, 0.35 * 22.91 * 60), (128, 0.27 * 20.23 * 60)):
        layout = trainer_layout(MODELS["32B"], GPUS["H800"], gpus, work, DEFAULT)
        assert layout is not None
        updates, logprobs = _step("32B", "H800", gpus, work, layout, shared=True)
        handling = 8192 * DEFAULT.batch_handling * work.max_response_tokens
        switch = DEFAULT.colocated_switch + gather_seconds(MODELS["32B"], GPUS["H800"], gpus, DEFAULT)
        found = updates + logprobs + handling + switch
        note = f"TP {layout.tensor} x PP {layout.stages} x DP {layout.ranks}"
        rows.append(row("trainer", f"DORA's sync on {gpus}: s without rollout", seconds, found, note))
        errors.append(abs(rows[-1]["error"]))
    work = dataclasses.replace(work, mean_response_tokens=1200, max_response_tokens=28672)
    found_at = {n: _step("7B", "H20", n, work, Layout(4, 1, n // 4)) for n in (16, 32, 64, 128)}
    for a, b, published in ((32, 128, 377.5 / 167.7), (64, 128, 203.7 / 167.7)):
        what = f"verl, update and log-probs, {a} over {b} GPUs"
        rows.append(row("trainer", what, published, sum(found_at[a]) / sum(found_at[b])))
        errors.append(abs(rows[-1]["error"]))
    for a, b, published in ((16, 64, 313.8 / 113.2), (32, 64, 157.0 / 113.2)):
        what = f"verl, update of asynchronous runs, {a} over {b} GPUs"
        rows.append(row("trainer", what, published, found_at[a][0] / found_at[b][0]))
        errors.append(abs(rows[-1]["error"]))
    return {"trainer_worst_error": max(errors)}
