"""What passes between GPUs: the all-reduces of a decode step, weights from the trainer to all rollouts at
once, and weights between a colocated trainer's layout and its engines'. Constants: constants.py."""

import math

from laminar_hpc.simulator.constants import Constants
from laminar_hpc.simulator.tables import Gpu, Model

_WIDTH = 2.0  # bytes of a bfloat16


def exchange_seconds(model: Model, gpu: Gpu, tensor: int, c: Constants) -> float:
    """One all-reduce of a token's hidden state over t GPUs: 2 (t - 1) / t of its bytes on each link."""
    return 2.0 * (tensor - 1) / tensor * _WIDTH * model.hidden / (c.nvlink_efficiency * gpu.nvlink)


def decode_reduce(model: Model, gpu: Gpu, tensor: int, c: Constants) -> tuple[float, float]:
    """Seconds of one all-reduce of a decode step, and more for each request. Within the GPUs of one NVLink
    domain it is the engine's own; beyond it is NCCL's, whose tree has a level more for each doubling of the
    machines and whose messages of some hundred KB are far from the links' rates."""
    if tensor == 1:
        return 0.0, 0.0
    if tensor <= gpu.domain:
        return c.decode_allreduce_seconds, exchange_seconds(model, gpu, tensor, c)
    levels = math.ceil(math.log2(math.ceil(tensor / gpu.domain)))
    latency = c.network_allreduce_seconds + (levels - 1) * c.network_hop_seconds
    return latency, _WIDTH * model.hidden / c.network_allreduce_bytes_per_second


def global_sync_seconds(
    model: Model, trainer: Gpu, trainer_gpus: int, rollout: Gpu, rollout_gpus: int, c: Constants
) -> float:
    """All rollouts take new weights at once, in a broadcast whose chain gives one copy to every machine: each
    link of a machine carries its part, on the side that has fewer of them. So more links of a machine help,
    and more machines neither help nor harm. Inside one NVLink domain it is one GPU's link."""
    size = _WIDTH * model.parameters
    if trainer is rollout and trainer_gpus + rollout_gpus <= trainer.domain:
        return c.pull_overhead + size / (c.global_sync_share * trainer.nvlink)
    rate = min(links_rate(trainer, trainer_gpus), links_rate(rollout, rollout_gpus))
    return c.pull_overhead + size / (c.global_sync_share * rate)


def links_rate(gpu: Gpu, gpus: int) -> float:
    """Bytes/s of the NICs of one machine, or of as many as there are GPUs."""
    return min(gpu.machine, max(1, gpus)) * gpu.nic


def gather_seconds(model: Model, gpu: Gpu, gpus: int, c: Constants) -> float:
    """Weights of a colocated trainer on their way into its engines' layout: each GPU has all of them pass
    through its own link, and keeps its part."""
    link = gpu.nvlink if gpus <= gpu.domain else gpu.nic
    return _WIDTH * model.parameters / (c.colocated_gather_share * link)
