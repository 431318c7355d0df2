"""What a trainer step moves and computes, counted on the CPU and not timed: bench/trainer.py prints both
figures, and tests/trainer holds them against their limits. Each needs a trainer world of one rank."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from laminar_hpc.config.schema import RunConfig
    from laminar_hpc.trainer.megatron.policy import MegatronPolicy
    from laminar_hpc.trainer.step.microbatch import MicroBatch


class Moved(TorchDispatchMode):
    """Bytes that operations read and write of tensors of so many elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.bytes = elements, 0

    def note(self, *tensors: object) -> None:
        self.bytes += sum(
            t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.numel() == self.elements
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "empty" not in func.name():
            self.note(*args, *(kwargs or {}).values(), out)
        return out


def logit_passes(rows: int = 48, columns: int = 640, vocabulary: int = 600) -> float:
    """Bytes that a bfloat16 head moves on a GPU, forward and backward, all products included, over those of
    its float32 logits.

    Stand-ins note what products and kernels move (tests/weights/kernels shows that a kernel reads and writes
    once); whatever else touches the logits is seen as an operation. Raises AssertionError where the log-probs
    are not those of torch.
    """
    from laminar_hpc.trainer.megatron import head

    hidden, temperature, moved = 16, 0.7, Moved(rows * columns)

    def product(x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        with _disable_current_modes():
            logits = x.float() @ weight.float().t()
        moved.note(logits)
        return logits

    def noted(name: str, of: object, read: tuple[int, ...]) -> contextlib.AbstractContextManager:
        function = getattr(of, name)

        def call(*args: torch.Tensor) -> object:
            moved.note(*(args[index] for index in read))
            with _disable_current_modes():
                return function(*args)

        return mock.patch.object(of, name, call)

    x = torch.randn(rows, hidden, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(columns, hidden, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,))
    with contextlib.ExitStack() as stack:
        stack.enter_context(noted("summary", head.kernels, (0,)))
        stack.enter_context(noted("gradient", head.kernels, (0, -1)))
        stack.enter_context(noted("add_products", head, (1,)))
        stack.enter_context(moved)
        logprobs, _ = head.chunked_logprobs(x, weight, targets, product, temperature, vocabulary)
        logprobs.sum().backward()
    wanted = (x.float() @ weight.float().t() / temperature)[:, :vocabulary].log_softmax(-1)
    torch.testing.assert_close(logprobs, wanted.gather(1, targets[:, None])[:, 0])
    assert weight.grad is not None and x.grad is not None
    return moved.bytes / (4 * rows * columns)


def products_and_gradients(
    policy: "MegatronPolicy", batch: "MicroBatch"
) -> tuple[int, dict[str, torch.Tensor]]:
    """Floating-point operations of all matrix products of one micro-batch, forward and backward, attention
    included; and its loss, the sum of its log-probs, and the gradients."""

    def loss(
        micro: "MicroBatch", logprobs: torch.Tensor, entropies: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return logprobs.sum(), torch.ones((), dtype=torch.int), logprobs.detach().sum()

    with FlopCounterMode(display=False) as counter:
        (total,) = policy.accumulate([batch], loss)
    gradients = {name: p.main_grad.clone() for name, p in policy.gpt.named_parameters()}
    return counter.get_total_flops(), {"loss": total, **gradients}


def selective_extra_arithmetic(config: "RunConfig", sequences: Sequence[Sequence[int]]) -> float:
    """The share of arithmetic that trainer.recompute_activations=selective adds to none's, for a pack of
    these sequences, of which all tokens but the first are trained. Changes `config`."""
    from laminar_hpc.trainer.megatron.packs import make_pack
    from laminar_hpc.trainer.megatron.policy import MegatronPolicy

    class Whole:
        pack = None

    found = {}
    for choice in ("none", "selective"):
        config.trainer.recompute_activations = choice
        policy, batch = MegatronPolicy(config), Whole()
        batch.pack = make_pack(sequences, [range(1, len(s)) for s in sequences], policy.device)
        found[choice], _ = products_and_gradients(policy, batch)
    return found["selective"] / found["none"] - 1


def main(model: Path) -> dict[str, float]:
    """Both figures, in a world of this process alone."""
    import torch.distributed as dist

    import laminar_hpc.machine.compat.torchvision  # noqa: F401 (before transformers)
    from laminar_hpc.config.schema import RunConfig

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = RunConfig()
    config.model.path = str(model)
    sequences = [[1 + i % 30 for i in range(n)] for n in (40, 200, 90)]
    extra = selective_extra_arithmetic(config, sequences)
    return {"logit_passes": logit_passes(), "selective_extra_arithmetic": extra}


if __name__ == "__main__":
    import json

    print(json.dumps(main(Path(sys.argv[1]))))
