"""Every number that the simulator takes from outside, each with its source. Nothing else in this folder holds
one.

"Laminar" is arXiv 2510.12633, "DORA" is arXiv 2604.26256. GPU types and models: conf/simulation/tables/. A
constant that is FITTED says to what; all others are published measurements, arithmetic or, where nothing is
published, an assumption that says so.
"""

from dataclasses import dataclass

from laminar_hpc.config.bounds import number


@dataclass(frozen=True)
class Constants:
    """Efficiencies, overheads and times. Times in seconds, rates in bytes/s, shares of 1."""

    # A decode step of N requests with K tokens of KV on t GPUs, L layers:
    #   L x layer + exchanges + max(weights / (eff x HBM), 2 P N / (eff_c x FLOPS)) + K kv / (eff_kv x HBM),
    # and without CUDA graphs no less than L x eager layer, in which the host launches its kernels. Weights:
    # Qwen2.5's speed benchmark (batch 1, vLLM 0.6.3, A100): 183.33, 84.28, 46.30 tokens/s for 1.5B, 7B, 14B;
    # least squares over 0.5B to 14B and 72B on four GPUs give 0.832.
    decode_hbm_efficiency: float = number(0.83, at_least=0.0001, at_most=1)
    # FITTED to 7B on one H100: 131, 5,163, 9,507, 13,588, 16,998 tokens/s with 1, 32, 64, 96, 128 requests.
    # The A100 above has 0.13 ms (tables/gpus.yaml), of which vLLM 0.6.3's host work is a part.
    decode_layer_seconds: float = number(0.055e-3, at_least=0, at_most=1)
    # A layer with latent attention and experts has many small kernels more: DeepSeek-R1 in FP8 takes 12.8 ms
    # for 8 requests on 8 H200 (SemiAnalysisAI/InferenceX, issue 870) and 23.1 ms for one on 16 H100
    # (tenstorrent/tt-inference-server, issue 356), of which reads take 5.1 and 0.8, all-reduces 1.2 and 5.6:
    # 0.11 and 0.27 ms for each of 61 layers, mean log
    decode_latent_layer_seconds: float = number(0.17e-3, at_least=0, at_most=1)
    # FITTED to the rollout of DORA's sync row at 64 GPUs, 65% of 22.91 min (bench/simulator_fit.py). Measured
    # elsewhere: 0.36 ms, Qwen3-0.6B in vLLM (pytorch/torchtitan, pull request 2373: 20 tokens in 199 ms, in
    # 52 ms with CUDA graphs); 0.40 ms, GPT-2 in vLLM and in SGLang on H200 (deepspeedai/DeepSpeed, pull
    # request 8352); 0.8 ms, 7B on A800 (vllm-project/vllm-omni, issue 7960)
    eager_layer_seconds: float = number(0.41e-3, at_least=0, at_most=1)
    # The same of a layer with experts, which has a router, a sort and two grouped products more: Qwen3-30B
    # takes 33.9 ms for its 48 layers without CUDA graphs (vllm-project/vllm, issue 45709: TP4, 8 requests)
    eager_expert_layer_seconds: float = number(0.70e-3, at_least=0, at_most=1)
    # What an engine's host does for each request between two steps: 1.37, 1.65 and 1.84 ms of a step outside
    # of the forward pass with 16, 24 and 32 requests (sgl-project/sglang-omni, issue 760). With
    # engine=vllm it comes on top of all else. SGLang's host does it while the GPU works, so it counts beside
    # the launches of an engine without CUDA graphs, and is hidden behind graphs, as that of vLLM's
    # asynchronous scheduler: 0 for that
    decode_request_seconds: float = number(29e-6, at_least=0, at_most=1)
    # assumption: engines' own all-reduce of a small message, of which a layer has two
    decode_allreduce_seconds: float = number(10e-6, at_least=0, at_most=1)
    # An all-reduce that leaves the GPUs of one NVLink domain (links.py), by NCCL: 46 us for a small message
    # between two machines of eight H20 with InfiniBand (NVIDIA/nccl, issue 1244) ...
    network_allreduce_seconds: float = number(46e-6, at_least=0, at_most=1)
    # ... two hops more of 8.5 us, there and back, for each doubling of the machines (NVIDIA/nccl,
    # src/graph/tuning.cc, issue 1334: the network's latency in a tree of the protocol LL128) ...
    network_hop_seconds: float = number(17e-6, at_least=0, at_most=1)
    # ... and the message at 20 GB/s: 159, 203 and 365 us for 64 KiB, 1 MiB and 4 MiB over two machines of
    # eight H100 (lessizzmore/create-a3mega-ztan-fork, ztan-NCCL-test-result)
    network_allreduce_bytes_per_second: float = number(20e9, at_least=1000, at_most=1e18)
    # NCCL's large all-reduces reach some 370 of 450 GB/s on an H100 node
    nvlink_efficiency: float = number(0.80, at_least=0.0001, at_most=1)
    # assumption: attention over a large ragged batch. Kernels alone (alibaba/InferSim, bench_data/mha/decode)
    # reach 0.42 to 0.80 with 16 requests of 4,096 tokens and 0.66 to 0.93 with 64 to 256, H20 and H800; batch
    # 1 with 30,720 tokens in Qwen2.5's table (A100, vLLM 0.6.3): 0.28 (72B) to 0.56 (14B)
    decode_kv_efficiency: float = number(0.65, at_least=0.0001, at_most=1)
    # Standard deviation of the log of a replica's speed. GPUs of one type in one cluster differ by 8% on
    # average (Sinha et al., SC22, arXiv 2208.11035): some four standard deviations among a few hundred
    replica_speed_spread: float = number(0.02, at_least=0, at_most=1)
    # Of the FLOP/s, attention over the KV cache where many heads share it, as latent attention has it: 0.5
    # (H800), 0.66 to 0.82 (H20) of kernels alone (alibaba/InferSim, bench_data/mla/decode)
    decode_attention_efficiency: float = number(0.50, at_least=0.0001, at_most=1)
    # Of the memory's rate, reading and writing a linear-attention layer's state: 128 requests with 32 heads
    # of 128 x 128 in 246 us on an H20 (alibaba/InferSim, bench_data/gdn/decode), 4 bytes each
    decode_state_efficiency: float = number(0.55, at_least=0.0001, at_most=1)
    # On an H100 (kernels.py scales it to others). Assumption: large GEMMs in bf16 reach 55-70% of the
    # datasheet
    decode_flops_efficiency: float = number(0.60, at_least=0.0001, at_most=1)
    # of GPU memory for weights and KV (what engines are usually given)
    kv_memory_share: float = number(0.90, above=0, at_most=1)
    # verl's colocated recipe, dapo_7b_math_fsdp2_colocate.sh: gpu_memory_utilization=0.80
    kv_memory_share_colocated: float = number(0.80, above=0, at_most=1)
    # On an H100. 72B on two: the first token after 8,192 in 1,064 ms, after 4,096 in 505 ms (tenstorrent/tt-
    # inference-server, issue 143): 0.57 to 0.60 of the datasheet
    prefill_mfu: float = number(0.57, at_least=0.0001, at_most=1)

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

    # Training: 6 P T per update, 2 P T for recomputation, 2 P T per extra log-prob pass.
    # Of the datasheet's FLOP/s on an H100, wide layers, exchanges not counted: Megatron-LM reaches 48% with
    # 462B and exchanges for the most part hidden (NVIDIA/Megatron-LM, README.md)
    train_kernel_efficiency: float = number(0.50, at_least=0.0001, at_most=1)
    # A hidden size of h takes 1 + train_narrow / (2 h) times as long: that README has 41% with 2B (h = 2,048)
    # and 48% with 462B (h = 18,432). What is done for each value between two products grows with h, products
    # with its square.
    train_narrow_hidden: float = number(820.0, at_least=0, at_most=1e5)
    # Arithmetic: of one pass over a token's logits, for each: bf16 written and read, float32 written and read
    # for the maximum and for the sum. Backward as much again.
    logit_bytes: float = number(16.0, at_least=0, at_most=1000)
    # Layers with experts (experts.py). Rows are moved into the experts' order and back: permuted, by chunks,
    # by chunks again, put back (Megatron-core, token_dispatcher.py, all-to-all).
    expert_moves: float = number(4.0, at_least=0, at_most=100)
    # Of each pass through a layer and micro-batch, whatever its tokens, for each expert that a GPU holds: the
    # host waits for the router's counts, then splits the rows and launches each expert's products. FITTED to
    # three publications (bench/simulator_fit.py) that ask for 0.09, 0.32 and 0.64 ms: their mean log
    expert_launch_seconds: float = number(0.263e-3, at_least=0, at_most=1)
    # Standard deviation of the log of an expert's tokens: a Gini coefficient of 0.2, between the 0.15 and
    # the 0.24 that bound Qwen3-30B's on real text (arXiv 2605.20982)
    expert_load_spread: float = number(0.36, at_least=0, at_most=5)
    # What products with an adapter add to decode steps and prefill, but for attention: 7 s to the 28 that
    # 96 prompts take without on an A100, 7B, rank 64 at most (vllm-project/vllm, issue 10062).
    decode_adapter_share: float = number(0.25, at_least=0, at_most=10)
    # assumption: clipping, optimizer and launches of an update
    update_overhead: float = number(0.2, at_least=0, at_most=1e6)
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
    # What is left of that per step where generation and training are apart: the same page's fully
    # asynchronous runs spend 3.7, 3.8 and 4.3 s of a step of 8,192 outside waiting and updates.
    overlapped_handling: float = number(3.9 / 8192 / 28672, at_least=0, at_most=1)
    # Both ways, per step, beside the weights: the mean log of what five runs spend outside of generation,
    # log-probs and updates, less their weights' gathering. NeMo RL 0.3: 8.0, 17.0, 9.0 and 16.0 s for 8B,
    # 70B, 32B and 30B-A3B; verl, the page above: 10.8 s for 7B on 64 and 128 GPUs (55 s on 32).
    colocated_switch: float = number(8.7, at_least=0, at_most=1e6)
    # Speed of a trainer that shares its GPUs with engines, over one with as many of its own: verl 0.78
    # (update and log-probs on 16 colocated H20 and on 12 of its own, docs/advance/one_step_off.md: 0.90 with
    # FSDP2, 0.76 with Megatron; updates on 32 and 64, fully_async.md: 0.58 and 0.85); over what is simulated
    # of one with its own, NeMo RL 0.3 0.92 and DORA's synchronous rows 1.12: their mean
    colocated_train_rate: float = number(0.94, at_least=0.01, at_most=10)
    # Of each GPU's own link, through which all weights pass on their way into the engines' layout: 13.9, 17.8
    # and 23.6 GB/s of some 43. NeMo RL's refits of 8B and 70B take 5 and 14 s (NVIDIA-NeMo/RL, issue 959), of
    # 30B-A3B and 235B 17.2 and 40.2 s, later 13.1 and 30.4 s (pull request 3294); differences, mean log.
    colocated_gather_share: float = number(0.42, at_least=0.0001, at_most=1)

    # Weights (Laminar, relay tier).
    # 0.64 s for 32B, 1.40 s for 72B
    publish_bytes_per_second: float = number(103e9, at_least=1000, at_most=1e18)
    # 72B to 127 relays in less than 1.6 s ...
    chain_bytes_per_second: float = number(103e9, at_least=1000, at_most=1e18)
    # ... which leaves this start-up per chunk in T* = (sqrt(M Tb) + sqrt((p - 2) Ts))^2
    chain_chunk_seconds: float = number(5e-5, at_least=0, at_most=1000)
    # assumption: flush, load in place, verification
    pull_overhead: float = number(0.3, at_least=0, at_most=1e6)
    # All rollouts at once, the trainer waits: of the links of one machine (links.py), in which every machine
    # has a copy pass through its own. 235B in 5.5 s, DeepSeek-V3 in 14 s (NVIDIA-NeMo/RL, pull request 1379,
    # 128 + 128 and 256 + 256 H100); to 16 and to 256 H20 688 GB in 10.2 and 11.3 s, 1,029 GB in 14.4 and
    # 16.0 s (MoonshotAI/checkpoint-engine, README.md): 0.18 to 0.28 of eight NICs, mean log. Dearer: verl's
    # checkpoint engine 14 and 20 GB/s (without it 4 and 8), NeMo RL before 36 and 39 GB/s.
    global_sync_share: float = number(0.21, at_least=0.0001, at_most=1)
    # assumption: one machine's eight NICs exchange what trainer groups average at the end of a step
    group_exchange_bytes_per_second: float = number(344e9, at_least=1000, at_most=1e18)
    # assumption: TCP connections that share a wide-area link
    wan_streams: float = number(32.0, at_least=1, at_most=10_000)
    # Of a full copy, what one step changes: 1% of the elements (PULSE, arXiv 2602.03839), 6 bytes for each
    # of 2 (docs/weights.md). 1.6% of the bytes were measured at a learning rate of 1e-6.
    changed_bytes_share: float = number(0.03, above=0, at_most=1)
    # one 400G NIC: 8K tokens of 32B in 52 ms
    kv_move_bytes_per_second: float = number(40e9, at_least=1000, at_most=1e18)
    # assumption: export, import and acknowledgement
    kv_move_latency: float = number(0.05, at_least=0, at_most=1e6)

    # What the model leaves out, as factors of all that engines' and trainers' tokens take: 1, and in ranges
    # as uncertain as the published rows of the kind are off (uncertainty.py)
    generation_error: float = number(1.0, at_least=0.01, at_most=100)
    training_error: float = number(1.0, at_least=0.01, at_most=100)
    # Of the log-lengths that emulated engines invent, between the groups of one prompt in two passes over the
    # data, at most GROUP_CORRELATION; 0 = a prompt's next group is as any other
    prompt_correlation: float = number(0.0, at_least=0, at_most=0.5)

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
# DORA's sync row at 64 GPUs: 14,143 tokens/s x 22.91 min / 8,192 trajectories, less the prompt
MEAN_RESPONSE_TOKENS_DORA = 2223.0
SIGMA_DORA = 1.69  # median ~1,097, mean 3,536, cap 30,720 at DORA's step 100 give this
# Laminar, introduction: P99 / median = 10. So sigma = ln 10 / 2.326, and with P99 at the cap of 16,384 the
# median is 1,638 and the mean of the capped lengths 2,596; DORA publishes 2.4K for the same model and data. A
# higher mean contradicts the ratio.
SIGMA_LAMINAR = 0.99
MEAN_RESPONSE_TOKENS_LAMINAR = 2596.0
