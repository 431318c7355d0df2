"""What a rank of a trainer world does in a test; called by name through ranks.py. Returns plain values, numpy arrays and bytes."""

import time
from pathlib import Path

import numpy as np
import tiny
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.trainer.checkpoint import Checkpointer
from laminar_hpc.trainer.learner import Learner
from laminar_hpc.trainer.megatron import MegatronPolicy
from laminar_hpc.trainer.microbatch import Example, MicroBatch, make_microbatch, trained
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.sums import tensor_sums


def place() -> tuple[int, int, int]:
    """This rank's tensor-, pipeline- and data-parallel rank."""
    return ps.get_tensor_model_parallel_rank(), ps.get_pipeline_model_parallel_rank(), ps.get_data_parallel_rank()


def read_logits(policy: MegatronPolicy, texts: list[list[int]]) -> np.ndarray | None:
    found = policy.read_logits(texts, lambda output, pack: output[0].float().cpu())
    return found[0].numpy() if found else None


def train(
    model: str, settings: dict, texts: list[list[int]], steps: tuple[int, int], run_dir: str, resume: bool = False
) -> dict[str, object]:
    """From the model, or from the checkpoint of the first of `steps`: logits, steps of training, checkpoint, logits."""
    config = tiny.make_config(Path(model), **settings)
    policy = MegatronPolicy(config)
    learner = Learner(config, policy)
    checkpointer = Checkpointer(Path(run_dir), policy, learner)
    first, last = steps
    if resume:
        checkpointer.load(first)
    before = read_logits(policy, texts)
    metrics = [learner.train(tiny.make_batch(seed=100 + step), step, lambda: None) for step in range(first, last)]
    _, state_hash = checkpointer.save(last, weight_id=last)
    names = [name for name, _ in policy.canonical_tensors()]
    return {
        "place": place(),
        "metrics": metrics,
        "gaps": learner.gaps,
        "before": before,
        "after": read_logits(policy, texts),
        "probe": policy.probe_logprobs(),
        "hash": state_hash,
        "names": names,
        "metadata": [(name, shape) for name, shape, _ in policy.canonical_metadata()],
    }


def gradients(model: str, settings: dict) -> dict[str, np.ndarray]:
    """The main gradients of one batch, by parameter."""
    config = tiny.make_config(Path(model), **settings, optimizer__lr=0.0)
    policy = MegatronPolicy(config)
    Learner(config, policy).train(tiny.make_batch(seed=1), 0, lambda: None)
    return {name: p.main_grad.numpy().copy() for name, p in policy.gpt.named_parameters()}


def elements_kept(model: str, settings: dict) -> int:
    """Elements that autograd has kept for the backward pass of a micro-batch when its forward pass is through."""
    policy = MegatronPolicy(tiny.make_config(Path(model), **settings))
    batch, kept, seen = tiny.make_batch(seed=1), 0, []

    def keep(t: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += t.numel()
        return t

    def loss(micro: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seen.append(kept)
        return logprobs.sum(), torch.ones((), dtype=torch.int), torch.zeros(())

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        policy.accumulate([make_microbatch([Example(t, torch.ones(len(trained(t)))) for t in batch], policy.device)], loss)
    return seen[0]


def packed(model: str, settings: dict) -> dict[str, object] | None:
    """On rank 0: the packed bucket's bytes and sums, and those of the canonical tensors as checkpoints have them."""
    policy = MegatronPolicy(tiny.make_config(Path(model), **settings))
    size, lead = layout(policy.canonical_metadata(), 0, 0).data_bytes, dist.get_rank() == 0
    bucket = torch.zeros(size, dtype=torch.uint8) if lead else None
    sums, tensors = policy.pack(bucket), [t for _, t in policy.canonical_tensors()]
    if not lead:
        return None
    whole = torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in tensors])
    return {"bucket": bucket.numpy(), "whole": whole.numpy(), "sums": sums(), "of_tensors": [tensor_sums(t) for t in tensors]}


def gather_alone(model: str, settings: dict) -> str:
    """Rank 0 puts the canonical tensors together, the others stay away: the error that it gets."""
    policy = MegatronPolicy(tiny.make_config(Path(model), **settings))
    if dist.get_rank() > 0:
        time.sleep(2 * policy.config.cluster.join_timeout_seconds)
        return ""
    try:
        list(policy.canonical_tensors())
    except LaminarError as error:
        return str(error)
    return "nothing"
