"""Every number that the simulator takes from outside, each with its source. Nothing else in this folder holds
one.

"Laminar" is arXiv 2510.12633, "DORA" is arXiv 2604.26256. Three constants are FITTED, on one row of one
table: DORA's synchronous run at 64 GPUs (22.91 min per step, 14,143 tokens/s, rollout-only share 65%). All
others are datasheets, published measurements, arithmetic or, where nothing is published, an assumption that
says so.
"""

from dataclasses import dataclass

from laminar_hpc.config.bounds import number

GIB, KIB = 1 << 30, 1 << 10


@dataclass(frozen=True)
class Gpu:
    """A GPU type. Rates per GPU, in bytes/s and dense bf16 FLOP/s; `price` in $ per hour is an assumption for
    examples only."""

    hbm: float
    flops: float
    memory: float
    nic: float
    pcie: float
    price: float


# Datasheets; PCIe 5 x16 gives 50-55 GB/s, a 400G NIC 40-47 GB/s (usable, as commonly measured); PCIe 4 half
# of it.
GPUS = {
    "H800": Gpu(hbm=3.35e12, flops=989e12, memory=80e9, nic=43e9, pcie=52e9, price=2.5),
    "H100": Gpu(hbm=3.35e12, flops=989e12, memory=80e9, nic=43e9, pcie=52e9, price=2.5),
    "H20": Gpu(hbm=4.0e12, flops=148e12, memory=96e9, nic=43e9, pcie=52e9, price=1.3),
    "A100": Gpu(hbm=2.04e12, flops=312e12, memory=80e9, nic=21e9, pcie=26e9, price=1.6),
    "L40S": Gpu(hbm=0.864e12, flops=362e12, memory=48e9, nic=11e9, pcie=26e9, price=0.9),
}
GPUS_PER_MACHINE = 8  # Laminar, evaluation


@dataclass(frozen=True)
class Model:
    """A dense model served and trained in bf16. `tensor_parallel`: GPUs of one rollout replica. `hf`: its
    name in config/models.py."""

    parameters: float
    layers: int
    heads: int
    kv_bytes: float  # per token: 2 (K and V) x layers x KV heads x head size x 2 bytes
    tensor_parallel: int
    hf: str


HEAD_SIZE = 128
# Qwen2.5's config.json; TP 4 for 32B as in Laminar's evaluation, the others by size.
MODELS = {
    "7B": Model(
        parameters=7.62e9, layers=28, heads=28, kv_bytes=56 * KIB, tensor_parallel=1, hf="Qwen2.5-7B"
    ),
    "32B": Model(
        parameters=32.8e9, layers=64, heads=40, kv_bytes=256 * KIB, tensor_parallel=4, hf="Qwen2.5-32B"
    ),
    "72B": Model(
        parameters=72.7e9, layers=80, heads=64, kv_bytes=320 * KIB, tensor_parallel=8, hf="Qwen2.5-72B"
    ),
}


@dataclass(frozen=True)
class Constants:
    """Efficiencies, overheads and times. Times in seconds, rates in bytes/s, shares of 1."""

    # FITTED on DORA's sync row at 64 GPUs, in this order (see bench/simulator_fit.py).
    # FITTED to the rollout time (65% of the step): launches and all-reduces of a decode step
    decode_overhead_per_layer: float = number(0.1864e-3, at_least=0, at_most=1)
    # FITTED to the rest of the step; 10-20% is usual for ragged batches of 8-16K, 30-40% packed
    train_mfu: float = number(0.303, at_least=0.0001, at_most=1)
    # FITTED to tokens/s x step time / 8,192 trajectories, less the prompt
    mean_response_tokens_dora: float = number(2246.0, at_least=1, at_most=1e7)

    # Decode, roofline: t = overhead + max((weights + sum KV) / (eff x HBM), 2 P N / (eff_c x FLOPS)).
    # 7B on one H100: 15.2 GB in 5.75 ms of 3.35 TB/s = 0.79
    decode_hbm_efficiency: float = number(0.80, at_least=0.0001, at_most=1)
    # assumption: large GEMMs in bf16 reach 55-70% of the datasheet
    decode_flops_efficiency: float = number(0.60, at_least=0.0001, at_most=1)
    # of GPU memory for weights and KV (what engines are usually given)
    kv_memory_share: float = number(0.90, above=0, at_most=1)
    # assumption: the trainer's remains and buffers share the GPU
    kv_memory_share_colocated: float = number(0.70, above=0, at_most=1)
    # large GEMMs with attention: 8K tokens of 32B on TP4 in 0.33 s
    prefill_mfu: float = number(0.40, at_least=0.0001, at_most=1)

    # Admission to an engine and preemption: SGLang 0.5.21, srt/managers/schedule_policy.py,
    # new_token_ratio_tracker.py and srt/environ.py.
    # a request is expected to grow by no more than this ...
    admission_clip_tokens: float = number(4096.0, at_least=1, at_most=1e7)
    # ... of which this share is kept free for each running request when an engine starts from idle,
    new_token_ratio: float = number(0.7, at_least=0, at_most=1)
    new_token_ratio_min: float = number(0.098, at_least=0, at_most=1)  # falling to this (0.7 x 0.14)
    new_token_ratio_steps: float = number(600.0, at_least=1, at_most=1e9)  # within so many decode steps
    # after a preemption the share is the one generated so far, and so many tokens per request
    retract_steps: float = number(20.0, at_least=0, at_most=1e9)

    # Training: 6 P T per update and 2 P T per extra log-prob pass.
    # log-probs of the old policy; DAPO has no reference model
    logprob_passes: float = number(1.0, at_least=0, at_most=100)
    # per update: reduce-scatter of fp32 gradients, all-gather of bf16 parameters, over the NICs
    gradient_bytes_per_parameter: float = number(6.0, at_least=0, at_most=1000)
    # 6 on each model-parallel rank (bf16 weights, fp32 gradients), 12 spread over all GPUs
    trainer_bytes_per_parameter: float = number(18.0, at_least=6, at_most=1000)
    # assumption: of GPU memory for these; the rest is for activations
    trainer_memory_share: float = number(0.60, above=0, at_most=1)
    # What one process does with a padded batch per pass, per trajectory and token of the longest response
    # allowed. verl, docs/advance/ fully_async.md: the log-prob pass over 8,192 of at most 28K takes 107.7,
    # 70.3, 53.9 s on 32, 64, 128 GPUs = 35.2 s + 2,309 s / GPUs.
    batch_handling: float = number(35.2 / 8192 / 28672, at_least=0, at_most=1)
    # assumption: offload, reload, re-capture, both ways, per step
    colocated_switch: float = number(10.0, at_least=0, at_most=1e6)

    # Weights (Laminar, relay tier).
    # 0.64 s for 32B, 1.40 s for 72B
    publish_bytes_per_second: float = number(103e9, at_least=1000, at_most=1e18)
    # 72B to 127 relays in less than 1.6 s ...
    chain_bytes_per_second: float = number(103e9, at_least=1000, at_most=1e18)
    # ... which leaves this start-up per chunk in T* = (sqrt(M Tb) + sqrt((p - 2) Ts))^2
    chain_chunk_seconds: float = number(5e-5, at_least=0, at_most=1000)
    # assumption: flush, load in place, verification
    pull_overhead: float = number(0.3, at_least=0, at_most=1e6)
    # rollouts wait up to 37% less with relays than with a global NCCL synchronisation
    global_sync_factor: float = number(1 / 0.63, at_least=0, at_most=1000)
    # one 400G NIC: 8K tokens of 32B in 52 ms
    kv_move_bytes_per_second: float = number(40e9, at_least=1000, at_most=1e18)
    # assumption: export, import and acknowledgement
    kv_move_latency: float = number(0.05, at_least=0, at_most=1e6)

    # Policies.
    repack_period: float = number(5.0, at_least=0.01, at_most=1e6)  # Laminar, dynamic repack: about 5 s
    # C_max as a share of capacity; the paper gives no value: room for growth without preemption
    repack_kv_share: float = number(0.90, above=0, at_most=1)

    # Failures: published restart times of a 32B replica and of whole jobs; an asynchronous checkpoint's
    # stall.
    replica_restart: float = number(119.0, at_least=0, at_most=1e6)
    job_restart: float = number(300.0, at_least=0, at_most=1e6)
    checkpoint_stall: float = number(3.0, at_least=0, at_most=1e6)


DEFAULT = Constants()

# Workloads. DAPO-Math-17k prompts: assumption of 150 tokens with the template. Group correlation: assumption;
# groups are similar in length.
PROMPT_TOKENS = 150
GROUP_CORRELATION = 0.5
SIGMA_DORA = 1.69  # median ~1,097, mean 3,536, cap 30,720 at DORA's step 100 give this
# Laminar, introduction: P99 / median = 10. So sigma = ln 10 / 2.326, and with P99 at the cap of 16,384 the
# median is 1,638 and the mean of the capped lengths 2,596; DORA publishes 2.4K for the same model and data. A
# higher mean contradicts the ratio.
SIGMA_LAMINAR = 0.99
MEAN_RESPONSE_TOKENS_LAMINAR = 2596.0
