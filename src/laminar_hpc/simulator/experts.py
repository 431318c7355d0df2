"""What layers with experts cost a trainer beyond their products: exchanges between the ranks that share the
experts, moving rows into the experts' order, the rank with most of the tokens, and a host that launches each
expert's products. Constants: constants.py."""

import math
from dataclasses import dataclass
from statistics import NormalDist

from laminar_hpc.simulator.constants import Constants
from laminar_hpc.simulator.tables import Gpu, Model

_WIDTH = 2.0  # bytes of a bfloat16
_NORMAL = NormalDist()


@dataclass(frozen=True)
class ExpertCosts:
    """Of a forward pass over all layers. `token`: seconds of one token of a micro-batch; `microbatch`: of
    each micro-batch, whatever its size; `work`: parameters that the fullest rank multiplies with beyond the
    mean, per token."""

    token: float = 0.0
    microbatch: float = 0.0
    work: float = 0.0


def expert_costs(model: Model, gpu: Gpu, tensor: int, ranks: int, c: Constants) -> ExpertCosts:
    """`tensor`: tensor-parallel GPUs, which divide a micro-batch's tokens between them; `ranks`: GPUs that
    share the experts. No two of a layer's steps overlap, as with Megatron-core's all-to-all dispatcher."""
    if not model.experts:
        return ExpertCosts()
    load = fullest(ranks, model.experts, c)
    row = model.expert_share * model.experts * model.hidden * _WIDTH / tensor  # bytes of a token's copies
    exchanges = 2.0 * row * exchange_share(gpu, ranks, c)
    moves = 2.0 * c.expert_moves * row / (c.decode_hbm_efficiency * gpu.hbm)
    return ExpertCosts(
        token=model.expert_layers * load * (exchanges + moves),
        microbatch=model.expert_layers * model.experts / ranks * c.expert_launch_seconds,
        work=(load - 1.0) * model.expert_share * model.expert_parameters,
    )


def exchange_share(gpu: Gpu, ranks: int, c: Constants) -> float:
    """Seconds per byte of a row in an all-to-all over `ranks` GPUs: what NVLink joins crosses it
    while the rest crosses the NICs."""
    inside = min(ranks, gpu.domain)
    near = (inside - 1) / ranks / (c.nvlink_efficiency * gpu.nvlink)
    return max(near, (ranks - inside) / ranks / gpu.nic)


def fullest(ranks: int, experts: int, c: Constants) -> float:
    """Tokens of the fullest of `ranks` over their mean: each holds as many experts, whose loads vary
    independently; the largest of n normal values lies at the quantile (n - 3/8) / (n + 1/4) (Blom, 1958)."""
    if ranks == 1:
        return 1.0
    spread = math.sqrt(math.expm1(c.expert_load_spread**2) * ranks / experts)
    return min(float(ranks), 1.0 + spread * _NORMAL.inv_cdf((ranks - 0.375) / (ranks + 0.25)))
