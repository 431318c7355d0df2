"""How much of a GPU's rates its kernels reach: reading weights, products, and what is done between products.
Constants: constants.py; what was measured of a GPU type: conf/simulation/tables/gpus.yaml."""

from laminar_hpc.simulator.constants import DEFAULT, Constants
from laminar_hpc.simulator.tables import GPUS, Gpu, Model


def weights_rate(gpu: Gpu, c: Constants) -> float:
    """Bytes/s at which a decode step reads weights: as measured, or the usual share of the memory's rate. A
    GPU with few multiprocessors for its memory cannot ask for more."""
    if gpu.reads is None:
        return c.decode_hbm_efficiency * gpu.hbm
    return gpu.reads * c.decode_hbm_efficiency / DEFAULT.decode_hbm_efficiency


def products_efficiency(gpu: Gpu, on_h100: float) -> float:
    """Share of the FLOP/s that whole layers reach, from what they reach on an H100. Large products alone
    reach `gpu.products`; the rest of the time goes to reading and writing memory between them, in proportion
    to FLOP/s over bytes/s: an H20, with 37 FLOP for each byte, waits less for it than an H100 with 295."""
    h100 = GPUS["H100"]
    rest = max(0.0, 1.0 / on_h100 - 1.0 / h100.products)
    return 1.0 / (1.0 / gpu.products + rest * memory_weight(gpu))


def train_efficiency(model: Model, gpu: Gpu, c: Constants) -> float:
    """The same of a trainer's layers, which reach less where they are narrow: what is done for each value
    grows with the hidden size, products with its square."""
    narrow = c.train_narrow_hidden / model.hidden * memory_weight(gpu)
    return 1.0 / (1.0 / products_efficiency(gpu, c.train_kernel_efficiency) + narrow)


def memory_weight(gpu: Gpu) -> float:
    """FLOP/s over bytes/s of memory, an H100's being 1."""
    h100 = GPUS["H100"]
    return gpu.flops / gpu.hbm / (h100.flops / h100.hbm)


def logits_seconds(model: Model, gpu: Gpu, tensor: int, c: Constants) -> float:
    """One pass over a token's logits, which tensor parallelism divides: log-softmax and loss in float32."""
    size = c.logit_bytes * model.config["vocab_size"] / tensor
    return float(size / (c.decode_hbm_efficiency * gpu.hbm))


def eager_seconds(model: Model, c: Constants) -> float:
    """The launches of a decode step without CUDA graphs, which no step is shorter than."""
    dense = model.layers - model.expert_layers
    return dense * c.eager_layer_seconds + model.expert_layers * c.eager_expert_layer_seconds
