"""What GPU types reach of their rates, layers of every kind, and what is done between products, in numbers
that a reader can check or that are published."""

from dataclasses import replace

import numpy as np
import pytest

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.cost import engine_costs, kv_capacity, kv_token_seconds
from laminar_hpc.simulator.kernels import (
    eager_seconds,
    logits_seconds,
    products_efficiency,
    train_efficiency,
    weights_rate,
)
from laminar_hpc.simulator.tables import GPUS, MODELS, model_of
from laminar_hpc.simulator.trainer_cost import Layout, colocated, job_costs, updates_seconds

H100, H20, A100 = GPUS["H100"], GPUS["H20"], GPUS["A100"]


@pytest.mark.parametrize(("model", "rate"), [("Qwen3-8B", 81.73), ("Qwen3-32B", 20.72)])
def test_an_h20_reads_weights_at_half_of_its_memorys_rate(model, rate):
    """Qwen3's speed benchmark, SGLang, one request; the rate itself was measured of kernels alone."""
    assert engine_costs(MODELS[model], H20, 1, DEFAULT).step(1, 1025) == pytest.approx(1 / rate, rel=0.2)
    assert weights_rate(H20, DEFAULT) == 1.8e12 and weights_rate(H100, DEFAULT) == 0.83 * 3.35e12


def test_what_is_uncertain_of_reads_is_uncertain_of_measured_ones():
    """Promise: a range does not take an H20's reads for certain."""
    drawn = replace(DEFAULT, decode_hbm_efficiency=0.83 * 0.9)
    assert weights_rate(H20, drawn) == pytest.approx(0.9 * 1.8e12)


def test_a_gpu_with_few_flops_for_its_memory_reaches_more_of_them():
    """1 / 0.90 + (1 / 0.5 - 1 / 0.72) x 37 / 295 for an H20; an H100 what the constant says. Engines prefill
    at 0.93 and 0.90 of an H20's FLOP/s (alibaba/InferSim, README.md)."""
    assert products_efficiency(H100, 0.5) == pytest.approx(0.5)
    assert products_efficiency(H20, 0.5) == pytest.approx(1 / (1 / 0.9 + 0.6111 * 0.12533), rel=1e-3)
    assert products_efficiency(H20, DEFAULT.prefill_mfu) == pytest.approx(0.915, rel=0.1)


def test_an_a100_trains_at_a_larger_share_than_an_h100_as_published():
    """Llama 2 7B with FSDP, 3,760 and 7,500 to 9,600 tokens/s per GPU (foundation-model-stack/fms-fsdp): 0.53
    and 0.33 to 0.42 with attention."""
    model = MODELS["Llama-3.1-8B"]
    ratio = train_efficiency(model, A100, DEFAULT) / train_efficiency(model, H100, DEFAULT)
    assert 0.525 / 0.42 - 0.05 < ratio < 0.525 / 0.33


@pytest.mark.parametrize(("hidden", "published"), [(2048, 0.41), (18432, 0.48)])
def test_narrow_layers_reach_less(hidden, published):
    """Megatron-LM's README: 41% of 2B, 48% of 462B on H100."""
    model = replace(MODELS["7B"], config=MODELS["7B"].config | {"hidden_size": hidden})
    assert train_efficiency(model, H100, DEFAULT) == pytest.approx(published, abs=0.015)


def test_logits_take_a_larger_part_of_a_small_models_update():
    """152,064 logits of 16 bytes at 0.83 x 3.35 TB/s take 0.88 us of a pass, divided by tensor parallelism:
    two passes are a fifth of what 0.5B's token takes and a fiftieth of 7B's."""
    assert logits_seconds(MODELS["7B"], H100, 1, DEFAULT) == pytest.approx(0.875e-6, rel=0.01)
    assert logits_seconds(MODELS["7B"], H100, 4, DEFAULT) == pytest.approx(0.875e-6 / 4, rel=0.01)
    free = replace(DEFAULT, logit_bytes=0.0)
    for name, share in (("0.5B", 0.17), ("7B", 0.015)):
        with_, without = (
            job_costs(MODELS[name], H100, 1, Layout(1, 1, 1, recompute=0.0), 1, 4096, c).train_token
            for c in (DEFAULT, free)
        )
        assert with_ / without - 1 == pytest.approx(share, rel=0.25)


def test_a_layer_with_experts_has_more_to_launch():
    """Qwen3-30B-A3B without CUDA graphs takes 33.9 ms of 48 layers (vllm-project/vllm, issue 45709); the
    dense layers of DeepSeek-V3 take what others do."""
    eager = engine_costs(MODELS["Qwen3-30B-A3B"], H100, 4, DEFAULT, cuda_graphs=False)
    assert eager.step(8, 8 * 4000) == pytest.approx(33.9e-3, rel=0.02)
    huge = MODELS["DeepSeek-V3"]
    assert eager_seconds(huge, DEFAULT) == pytest.approx(3 * 0.41e-3 + 58 * 0.70e-3)


def test_latent_attention_is_bound_by_its_heads_where_flops_are_few():
    """Every head of a rank scores the whole latent: 61 layers of 128 heads x 2 (2 x 512 + 64) FLOP. Kernels
    on an H20 and an H800 take 1,370 and 292 us a layer for 128 requests of 4,096 tokens (alibaba/InferSim,
    bench_data/mla/decode), all heads on one GPU."""
    model = MODELS["DeepSeek-V3"]
    assert model.kv_flops == 61 * 2 * 128 * (2 * 512 + 64)
    for gpu, published, rel in ((H20, 1370e-6, 0.5), (GPUS["H800"], 292e-6, 0.1)):
        layer = kv_token_seconds(model, gpu, 1, DEFAULT) / 61 * 128 * 4096
        assert layer == pytest.approx(published, rel=rel), gpu
    # shared heads are bound by reading their keys and values
    dense = MODELS["32B"]
    assert kv_token_seconds(dense, H100, 4, DEFAULT) == pytest.approx(dense.kv_bytes / (0.65 * 4 * 3.35e12))


def test_a_hybrid_model_keeps_kv_in_its_full_layers_and_a_state_in_the_others():
    """Qwen3-Next: 12 of 48 layers have two KV heads of 256; each of the other 36 has 32 states of 128 x 128
    float32 and a convolution's last three inputs, at any length."""
    model = MODELS["Qwen3-Next-80B-A3B"]
    assert model.parameters == pytest.approx(80e9, rel=0.03)
    assert model.active_parameters == pytest.approx(3.5e9, rel=0.2)
    assert model.kv_bytes == 12 * 2 * 2 * 256 * 2 and model.attention_layers == 12
    assert model.state_bytes == 36 * (32 * 128 * 128 * 4 + 3 * (2 * 2048 + 4096) * 2)
    none, many = (kv_capacity(model, H100, 2, 0.9, requests) for requests in (0, 256))
    assert none - many == pytest.approx(256 * model.state_bytes / model.kv_bytes, rel=0.01)


def test_a_state_is_read_and_written_at_each_step():
    """128 requests take 246 us in a layer on an H20 (alibaba/InferSim, bench_data/gdn/decode)."""
    config = MODELS["Qwen3-Next-80B-A3B"].config
    hybrid = model_of("hybrid", config)
    full = model_of("full", {k: v for k, v in config.items() if k != "full_attention_interval"})
    more = engine_costs(hybrid, H20, 1, DEFAULT).request - engine_costs(full, H20, 1, DEFAULT).request
    assert 128 * more / 36 == pytest.approx(246e-6, rel=0.1)


def test_a_trainer_that_shares_its_gpus_is_slower():
    """By the constant, in updates and in log-probs; what is not of tokens stays."""
    job = job_costs(MODELS["7B"], H100, 8, Layout(4, 1, 2), 8, 4096, DEFAULT)
    shared = colocated(job, DEFAULT)
    tokens, layout = [1000] * 64, Layout(4, 1, 2)
    alone, beside = (updates_seconds(tokens, 1, j, layout, np.random.default_rng(0)) for j in (job, shared))
    assert alone / beside == pytest.approx(DEFAULT.colocated_train_rate)
    assert shared.update == job.update and shared.logprob_token > job.logprob_token
