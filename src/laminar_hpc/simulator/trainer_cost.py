"""The trainer's seconds from what its layout does: matrix products, exchanges of tensor parallelism, pipeline
bubbles, the longest sequence, gradients. Constants: constants.py."""

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace

import numpy as np

from laminar_hpc.config.models import head_size, kv_heads
from laminar_hpc.config.schema import LoraConfig
from laminar_hpc.simulator.constants import Constants
from laminar_hpc.simulator.cost import attention_share, chain_seconds
from laminar_hpc.simulator.experts import expert_costs
from laminar_hpc.simulator.kernels import logits_seconds, train_efficiency
from laminar_hpc.simulator.links import exchange_seconds, gather_seconds
from laminar_hpc.simulator.lora import adapter_seconds, trained_part
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.tables import Gpu, Model
from laminar_hpc.simulator.workload import Workload

_LOOKED_AT = 8192  # trajectories by which layouts are compared


@dataclass(frozen=True)
class Layout:
    """The trainer's GPUs: tensor parallelism, pipeline stages, data-parallel ranks. `tokens`: of a
    micro-batch, 0 = as many as the rank's longest trajectory. `recompute`: the share of the forward
    pass that backward repeats. `balanced`: ranks get trajectories by their tokens, as in a run of our own,
    else at random. `packed`: micro-batches are packs of whole trajectories (`packed`), of `logprob_tokens`
    in log-prob passes, 0 = as many. `experts`: GPUs that share a layer's experts. `even`: stages take
    equally long; else the last one has the output layer beside as many layers as the others. `context`: GPUs
    over which each micro-batch is split, beside those of `tensor` and `stages`. `chunks`: of a stage, run in
    turns. `lora`: the adapter that is trained in place of the weights, if its rank is above 0."""

    tensor: int
    stages: int
    ranks: int
    tokens: int = 0
    recompute: float = 1.0
    balanced: bool = False
    packed: bool = False
    logprob_tokens: int = 0
    experts: int = 1
    even: bool = True
    context: int = 1
    chunks: int = 1
    lora: LoraConfig = field(default_factory=LoraConfig)

    def slowest_stage(self, model: Model) -> float:
        """Products of the slowest stage over their mean."""
        return 1.0 if self.even else 1.0 + (self.stages - 1) * model.head_parameters / model.active_parameters


@dataclass(frozen=True)
class JobCosts:
    """Everybody else's seconds than the engines'."""

    train_token: float = 0.0  # forward and backward, all GPUs together
    train_attention: float = 0.0  # the same per squared token of a trajectory
    logprob_token: float = 0.0  # the extra forward passes
    logprob_attention: float = 0.0
    handling: float = 0.0  # one process handles the batch while the trainer waits: per trajectory
    overlapped_handling: float = 0.0  # what is left of it where the next batch is handled during training
    update: float = 0.0
    publish_stall: float = 0.0
    chain: float = 0.0
    switch: float = 0.0
    checkpoint: float = 0.0
    job_restart: float = 0.0
    repack_period: float = 0.0
    # of each micro-batch, whatever its size
    train_microbatch: float = 0.0
    logprob_microbatch: float = 0.0
    turn_scale: float = 1.0  # environment latencies are multiplied by this
    score: float = 0.0  # from the last token of a group to its last reward


def colocated(costs: JobCosts, c: Constants) -> JobCosts:
    """The same of a trainer that shares its GPUs with engines: less memory for its micro-batches, and states
    that come and go."""
    names = ("train_token", "train_attention", "logprob_token", "logprob_attention")
    return replace(costs, **{name: getattr(costs, name) / c.colocated_train_rate for name in names})


def only_training(token: float) -> JobCosts:
    """Costs of nothing but `token` seconds for each token, over all ranks."""
    return JobCosts(train_token=token, repack_period=1.0)


def job_costs(
    model: Model, gpu: Gpu, gpus: int, layout: Layout, rollout_gpus: int, cap: int, c: Constants
) -> JobCosts:
    """`gpu`, `gpus`: the trainer's; `cap`: tokens of the longest response allowed."""
    padding = c.batch_handling * cap
    trained = trained_part(model, layout.lora)
    return replace(
        token_costs(model, gpu, layout, c),
        handling=(1.0 + c.logprob_passes) * padding,
        overlapped_handling=c.overlapped_handling * cap,
        update=c.update_overhead + gradient_seconds(trained, gpu, gpus, layout, c),
        publish_stall=2.0 * trained.parameters / c.publish_bytes_per_second,
        chain=chain_seconds(2.0 * trained.parameters, math.ceil(rollout_gpus / gpu.machine), c),
        switch=c.colocated_switch + gather_seconds(trained, gpu, gpus, c),
        checkpoint=c.checkpoint_stall,
        job_restart=c.job_restart,
        repack_period=c.repack_period,
    )


def token_costs(model: Model, gpu: Gpu, layout: Layout, c: Constants) -> JobCosts:
    """What tokens, their attention and micro-batches take, and nothing else.

    A token's forward pass takes its matrix products, two all-reduces per layer and a pass over its logits;
    backward twice the products, or with an adapter once (lora.py), and as much of the others; recomputation
    another forward pass (Korthikanti et al., arXiv 2205.05198, sections 4 and 5). A layer with experts has
    one all-reduce and what experts.py says. Context parallelism divides all of it, and adds two all-to-alls
    per layer (`context_exchange_seconds`); chunks of a stage hand on more often (`chunk_exchange_seconds`).
    """
    expert = expert_costs(model, gpu, layout.tensor * layout.context, layout.experts, c)
    rate = min(1.0, train_efficiency(model, gpu, c) / c.training_error) * gpu.flops
    flops = rate * layout.tensor * layout.stages * layout.context
    attention = 2.0 * model.active_parameters / flops * attention_share(model)
    products = 2.0 * (model.active_parameters + expert.work) / flops * layout.slowest_stage(model)
    reduces = (2.0 * model.layers - model.expert_layers) / layout.stages
    exchanges = reduces * exchange_seconds(model, gpu, layout.tensor, c) / layout.context
    exchanges += expert.token / layout.stages + context_exchange_seconds(model, gpu, layout, c)
    exchanges += chunk_exchange_seconds(model, gpu, layout, c)
    exchanges *= c.training_error
    logits = logits_seconds(model, gpu, layout.tensor * layout.context, c) * c.training_error
    logits /= layout.stages if layout.even else 1
    again = layout.recompute
    adapter = adapter_seconds(model, gpu, layout.lora, rate, c)
    forward, backward = (seconds * rate / flops for seconds in adapter)
    passes = 2.0 if layout.lora.rank else 3.0
    train = (passes + again) * products + (2.0 + again) * exchanges + 2.0 * logits
    return JobCosts(
        train_token=(train + (1.0 + again) * forward + backward) / layout.ranks,
        train_attention=(3.0 + again) * attention / layout.ranks,
        logprob_token=c.logprob_passes * (products + exchanges + logits + forward) / layout.ranks,
        logprob_attention=c.logprob_passes * attention / layout.ranks,
        train_microbatch=(2.0 + again) * expert.microbatch / layout.stages,
        logprob_microbatch=c.logprob_passes * expert.microbatch / layout.stages,
    )


def peak_rate(model: Model, gpu: Gpu, gpus: int, lora: LoraConfig, c: Constants) -> float:
    """Tokens/s that the datasheet's FLOP/s of the trainer's GPUs allow, of products alone: forward, backward
    and log-probs. Nothing trains faster."""
    passes = 1.0 + (1.0 if lora.rank else 2.0) + c.logprob_passes
    return gpus * gpu.flops / (passes * 2.0 * model.active_parameters)


def context_exchange_seconds(model: Model, gpu: Gpu, layout: Layout, c: Constants) -> float:
    """Of a token's forward pass: in each layer every GPU sends what it has of queries, keys, values and
    attention's output to the others that share the micro-batch; over NVLink where one machine has them."""
    if layout.context == 1:
        return 0.0
    shape = model.config
    values = 2 * (shape["num_attention_heads"] + kv_heads(shape)) * head_size(shape)
    sent = 2.0 * values * (layout.context - 1) / layout.context / (layout.tensor * layout.context)
    inside = layout.tensor * layout.context <= gpu.domain
    return model.layers / layout.stages * sent / (c.nvlink_efficiency * gpu.nvlink if inside else gpu.nic)


def chunk_exchange_seconds(model: Model, gpu: Gpu, layout: Layout, c: Constants) -> float:
    """Of a token's forward pass: a stage of v chunks hands its hidden state on v - 1 times more than a stage
    of one, whose hand-over counts as nothing; over NVLink where one machine has all stages."""
    gpus = layout.tensor * layout.context
    sent = 2.0 * model.hidden / gpus * (layout.chunks - 1)
    inside = gpus * layout.stages <= gpu.domain
    return sent / (c.nvlink_efficiency * gpu.nvlink if inside else gpu.nic)


def gradient_seconds(model: Model, gpu: Gpu, gpus: int, layout: Layout, c: Constants) -> float:
    """Reduce-scatter of gradients and all-gather of parameters over the ranks that hold the same: over the
    NICs of the GPUs that NVLink joins, which carry one copy of the model, or of its part, or over NVLink
    where it joins all."""
    shared = model.parameters - model.expert_parameters
    parts = [(shared, layout.tensor * layout.stages, layout.ranks * layout.context)]
    if model.experts:
        copies = max(1, layout.tensor * layout.context * layout.ranks // layout.experts)
        parts.append((model.expert_parameters, layout.experts * layout.stages, copies))
    seconds = 0.0
    for parameters, spread, holders in parts:
        size = c.gradient_bytes_per_parameter * parameters * (holders - 1) / holders
        if gpus <= gpu.domain:
            seconds += size / (spread * c.nvlink_efficiency * gpu.nvlink)
        else:
            seconds += size / (max(gpu.domain, spread) * gpu.nic)
    return seconds


def updates_seconds(
    tokens: list[int], updates: int, costs: JobCosts, layout: Layout, random: np.random.Generator
) -> float:
    """Seconds of forward and backward over all updates: trajectories are dealt out at random, equally many to
    each data-parallel rank and update, and an update waits for its slowest rank. For 512 ragged ones on 8
    ranks that is some 1.3 times the mean; with more ranks it tends to the longest trajectory, and more GPUs
    help no more. Ranks that are balanced by tokens take the mean, or the longest trajectory alone through all
    stages.

    m micro-batches through p pipeline stages of v chunks take 1 + (p - 1) / (m v) times as long (the bubble,
    Narayanan et al., arXiv 2104.04473, section 2.2).
    """
    if layout.packed:
        share = -(-len(tokens) // updates)
        parts = [tokens[at : at + share] for at in range(0, len(tokens), share)]
        of_pass = (costs.train_token, costs.train_attention, costs.train_microbatch)
        return sum(_packed_seconds(part, layout.tokens, layout, *of_pass) for part in parts)
    each = -(-len(tokens) // (updates * layout.ranks))
    padded = np.zeros(updates * layout.ranks * each)
    padded[: len(tokens)] = tokens
    dealt = random.permutation(padded).reshape(updates, layout.ranks, each)
    seconds = (dealt * costs.train_token + dealt * dealt * costs.train_attention).sum(axis=2)
    room = np.maximum(1.0, dealt.max(axis=2))
    microbatches = dealt.sum(axis=2) / (np.maximum(room, layout.tokens) if layout.tokens else room)
    seconds += np.ceil(microbatches) * costs.train_microbatch / layout.ranks
    if layout.stages > 1:
        seconds *= 1.0 + (layout.stages - 1) / (layout.chunks * np.maximum(1.0, microbatches))
    if layout.balanced:
        longest = dealt.max(axis=(1, 2))
        alone = layout.stages * longest * (costs.train_token + longest * costs.train_attention)
        return float(np.maximum(seconds.mean(axis=1), alone).sum() * layout.ranks)
    return float(seconds.max(axis=1).sum() * layout.ranks)


def logprob_seconds(tokens: list[int], costs: JobCosts, layout: Layout) -> float:
    """Seconds of the log-prob passes over a batch."""
    if not layout.packed:
        return sum(tokens) * costs.logprob_token + sum(n * n for n in tokens) * costs.logprob_attention
    room = layout.logprob_tokens or layout.tokens
    of_pass = (costs.logprob_token, costs.logprob_attention, costs.logprob_microbatch)
    return _packed_seconds(tokens, room, layout, *of_pass)


def _packed_seconds(
    tokens: list[int], room: int, layout: Layout, token: float, attention: float, microbatch: float
) -> float:
    """One pass over packs of `room` tokens; costs are those of all ranks together."""
    ranks = layout.ranks
    return pass_seconds(tokens, room, ranks, layout.stages, token * ranks, attention * ranks, microbatch)


def step_seconds(
    model: Model, gpu: Gpu, gpus: int, layout: Layout, w: WorkloadConfig, sample: list[int], c: Constants
) -> float:
    """Updates, gradients and log-probs of a sample of a batch: what layouts are compared by."""
    costs = job_costs(model, gpu, gpus, layout, gpu.machine, w.max_response_tokens, c)
    updates = updates_of(w, sample)
    seconds = updates_seconds(sample, updates, costs, layout, np.random.default_rng(0))
    return seconds + updates * costs.update + sum(sample) * costs.logprob_token


def updates_of(w: WorkloadConfig, sample: list[int]) -> int:
    """Updates that so large a part of a batch takes."""
    return max(1, round(w.updates_per_step * len(sample) / (w.prompts_per_step * w.samples_per_prompt)))


def batch_sample(w: WorkloadConfig) -> list[int]:
    """Tokens of a batch of trajectories, or of the first part of a large one, prompts included."""
    work = Workload(w, 0, 1)
    groups = max(1, min(w.prompts_per_step, _LOOKED_AT // w.samples_per_prompt))
    return [n + w.prompt_tokens for index in range(groups) for n in work.lengths(index)]


def packed(tokens: list[int], room: int, ranks: int) -> list[tuple[int, int]]:
    """Tokens and squared tokens of each pack: the longest trajectories first, each into the fullest pack that
    has room for it, of `room` tokens. As many packs for each of `ranks`; the last ones may be empty."""
    packs: list[tuple[int, int]] = []
    free: list[tuple[int, int]] = []  # (room that is left, pack), in order
    for n in sorted(tokens, reverse=True):
        at = bisect_left(free, (n, 0))
        left, index = free.pop(at) if at < len(free) else (room, len(packs))
        if index == len(packs):
            packs.append((0, 0))
        packs[index] = packs[index][0] + n, packs[index][1] + n * n
        insort(free, (left - n, index))
    return packs + [(0, 0)] * (-len(packs) % ranks)


def pass_seconds(
    tokens: list[int], room: int, ranks: int, stages: int, token: float, attention: float, microbatch: float
) -> float:
    """Seconds until the slowest rank is through its packs: `token` for each token, `attention` for each
    squared token of a trajectory, `microbatch` for each pack. A pipeline's buffers have one size, so its
    packs are filled up to the fullest; m of them through p stages take (m + p - 1) / m times as long."""
    packs = packed(tokens, room, ranks)
    size = max(total for total, _ in packs)
    each = len(packs) // ranks
    seconds = [
        sum(
            (size if stages > 1 else total) * token + squares * attention
            for total, squares in packs[rank::ranks]
        )
        for rank in range(ranks)
    ]
    return (max(seconds) + each * microbatch) * (1.0 + (stages - 1) / each)
