"""What a rank of a trainer world does in a test; called by name through ranks.py. Returns plain values, numpy
arrays and bytes."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.trainer import engine_shards, publishing, tiny
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import LOGITS_BYTES
from laminar_hpc.line.messages.chain import RelayHas
from laminar_hpc.line.messages.publication import Published
from laminar_hpc.trainer import control
from laminar_hpc.trainer.agreement import Agreement
from laminar_hpc.trainer.canonical import files
from laminar_hpc.trainer.checkpoint import Checkpointer
from laminar_hpc.trainer.megatron import head
from laminar_hpc.trainer.megatron.distillation import TeacherRows
from laminar_hpc.trainer.megatron.packs import make_pack
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner
from laminar_hpc.trainer.step.microbatch import MicroBatch, make_microbatch
from laminar_hpc.weights.kernels.sums import add_sums, tensor_sums
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.stream import chunks

FILE_BYTES = files.FILE_BYTES
ROWS = 7  # of a chunk of logits, see `in_chunks`


def place() -> tuple[int, int, int]:
    """This rank's tensor-, pipeline- and data-parallel rank."""
    return (
        ps.get_tensor_model_parallel_rank(),
        ps.get_pipeline_model_parallel_rank(),
        ps.get_data_parallel_rank(),
    )


def all_logits(
    policy: MegatronPolicy, texts: list[list[int]], read: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """`read(logits [1, places, vocabulary / TP])` on the last stage, at the places of all tokens of all texts
    but the first of each, of this rank's share of them."""
    pack = make_pack(texts, [range(1, len(text)) for text in texts], policy.device)
    return policy._read([pack], lambda output, _: read(output), hands_on=False)


def read_logits(policy: MegatronPolicy, texts: list[list[int]]) -> np.ndarray | None:
    found = all_logits(policy, texts, lambda output: output[0].float().cpu())
    return found[0].numpy() if found else None


def train(
    model: str,
    settings: dict,
    texts: list[list[int]],
    steps: tuple[int, int],
    run_dir: str,
    resume: bool = False,
) -> dict[str, object]:
    """From the model, or from the checkpoint of the first of `steps`: logits, steps of training, checkpoint,
    logits."""
    config = tiny.make_config(Path(model), **settings)
    policy = MegatronPolicy(config)
    learner = Learner(config, policy)
    checkpointer = Checkpointer(Path(run_dir), policy, learner)
    first, last = steps
    if resume:
        checkpointer.load(first)
    before = read_logits(policy, texts)
    metrics = [
        learner.train(tiny.step_batch(tiny.make_batch(seed=100 + step)), step, lambda: None)
        for step in range(first, last)
    ]
    _, state_hash = checkpointer.save(last)
    names = [name for name, _ in policy.canonical_tensors()]
    return {
        "place": place(),
        "metrics": metrics,
        "mismatches": learner.mismatches,
        "before": before,
        "after": read_logits(policy, texts),
        "probe": policy.probe_logprobs(),
        "hash": state_hash,
        "names": names,
        "metadata": [(name, shape) for name, shape, _ in policy.canonical_metadata()],
    }


def groups_of(model: str, settings: dict) -> list[list[int]]:
    """The ranks of each process group that this rank is in, once it has a policy."""
    MegatronPolicy(tiny.make_config(Path(model), **settings))
    ranks_of = dist.distributed_c10d._world.pg_group_ranks.values()
    return [list(of) for of in ranks_of if dist.get_rank() in of]


def weights_of(policy: MegatronPolicy) -> dict[str, np.ndarray]:
    return {name: t.float().cpu().numpy().copy() for name, t in policy.canonical_tensors()}


def steps(model: str, settings: dict, count: int) -> dict[str, object]:
    """So many steps of training: metrics, mismatches, log-probs, and on rank 0 the weights, before too."""
    policy = MegatronPolicy(tiny.make_config(Path(model), **settings))
    learner, before = Learner(policy.config, policy), weights_of(policy)
    batches = [tiny.step_batch(tiny.make_batch(seed=100 + step)) for step in range(count)]
    metrics = [learner.train(batch, step, lambda: None) for step, batch in enumerate(batches)]
    return {
        "metrics": metrics,
        "mismatches": learner.mismatches,
        "logprobs": policy.probe_logprobs(),
        "before": before,
        "weights": weights_of(policy),
    }


def guarded(model: str, settings: dict) -> dict[str, object]:
    """Three steps under the divergence guard: with two bad trajectories, with a bad batch, with neither."""
    policy = MegatronPolicy(tiny.make_config(Path(model), **settings))
    learner, metrics, left_out, skipped = Learner(policy.config, policy), [], [], []
    for step in range(3):
        batch = tiny.on_policy(Path(model), tiny.make_batch(seed=step))
        for t in ((batch[2], batch[9]), batch, ())[step]:
            t.logprobs = [t.logprobs[0], *(value - 9 for value in t.logprobs[1:])]
        batch[9].logprobs = [float("nan") if step == 0 else value for value in batch[9].logprobs]
        metrics.append(learner.train(tiny.step_batch(batch), step, lambda: None))
        left_out.append(learner.guarded.left_out)
        skipped.append(learner.guarded.skipped)
    found = weights_of(policy)
    dist.barrier()  # what the last rank has sent is received
    return {
        "metrics": metrics,
        "left_out": left_out,
        "skipped": skipped,
        "state": learner.state["guard"],
        "weights": found,
    }


def save_in_shares(model: str, settings: dict, run_dir: str) -> dict[str, object]:
    """A step of training and its checkpoint, with files of hf/ as small as may be: the bytes that this rank
    writes of optimizer and weights, the items that the embeddings' padding adds, the weights, on rank 0, and
    the state's hash."""
    files.FILE_BYTES = 1 << 10
    try:
        policy = MegatronPolicy(tiny.make_config(Path(model), **settings))
        learner = Learner(policy.config, policy)
        checkpointer = Checkpointer(Path(run_dir), policy, learner)
        learner.train(tiny.step_batch(tiny.make_batch(seed=1)), 0, lambda: None)
        checkpointer.prepare()
        _, state_hash = checkpointer.save(1)
    finally:
        files.FILE_BYTES = FILE_BYTES
    kept = checkpointer._copies._kept
    shards = sum(buffer.nbytes for name, buffer in kept.items() if name.startswith("shard "))
    rows = policy.transformer.hidden_size * (policy.gpt.vocab_size - policy.shape.vocab)
    return {
        "shards": shards,
        "hf": sum(buffer.nbytes for buffer in kept.values()) - shards,
        "padding": rows * (1 if policy.shape.tied else 2),
        "weights": {name: t.clone() for name, t in policy.canonical_tensors()},
        "hash": state_hash,
    }


def load_shares(model: str, settings: dict, run_dir: str) -> dict[str, object]:
    """What is loaded of it: the weights, on rank 0, and the state's hash."""
    policy = MegatronPolicy(tiny.make_config(Path(model), **settings))
    checkpointer = Checkpointer(Path(run_dir), policy, Learner(policy.config, policy))
    checkpointer.load(1)
    weights = {name: t.clone() for name, t in policy.canonical_tensors()}
    return {"weights": weights, "hash": checkpointer.state_hash()}


def gradients(model: str, settings: dict) -> dict[str, np.ndarray]:
    """The main gradients of one batch, by parameter that is trained."""
    config = tiny.make_config(Path(model), **settings, optimizer__lr=0.0)
    policy = MegatronPolicy(config)
    Learner(config, policy).train(tiny.step_batch(tiny.make_batch(seed=1)), 0, lambda: None)
    trained = ((name, p) for name, p in policy.gpt.named_parameters() if p.requires_grad)
    return {name: p.main_grad.numpy().copy() for name, p in trained}


def gradients_by_settings(model: str, settings: list[dict]) -> list[dict[str, np.ndarray]]:
    """`gradients` for each of the settings, which have one layout."""
    return [gradients(model, each) for each in settings]


def elements_kept(model: str, settings: dict) -> int:
    """Elements of all tensors, parameters aside, that autograd still has for the backward pass of a
    micro-batch when its forward pass is through."""
    policy = MegatronPolicy(tiny.make_config(Path(model), **settings))
    batch, kept, seen = tiny.make_batch(seed=1), {}, []
    parameters = {p.untyped_storage()._cdata for p in policy.gpt.parameters()}

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage
        return t

    def loss(
        micro: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seen.append(sum(storage.nbytes() for storage in kept.values()) // 4)
        return logprobs.sum(), torch.ones((), dtype=torch.int), torch.zeros(())

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        policy.accumulate([make_microbatch(tiny.examples(batch), policy.device)], loss)
    return seen[0]


def packed(model: str, settings: dict, sizes: list[int]) -> dict[str, object] | None:
    """On rank 0, by size of the chunks: what was packed, and its sums; and those of the canonical tensors as
    checkpoints have them."""
    policy = MegatronPolicy(tiny.make_config(Path(model), **settings))
    manifest, leads = layout(policy.canonical_metadata(), 0, 0), dist.get_rank() == 0
    buckets: dict[int, np.ndarray] = {}
    sums: dict[int, list[tuple[int, int]]] = {}
    for size in sizes:
        bytes_packed = torch.zeros(manifest.data_bytes, dtype=torch.uint8)
        parts: dict[int, list[tuple[int, int]]] = {}
        for spans, bucket in zip(chunks(manifest, size), bytes_packed.split(size), strict=True):
            read = policy.pack(spans, bucket if leads else None)
            for span, both in zip(spans, read() if leads else [(0, 0)] * len(spans), strict=True):
                parts.setdefault(span.tensor, []).append(both)
        buckets[size] = bytes_packed.numpy()
        sums[size] = [add_sums(parts[number]) for number in range(len(manifest.tensors))]
    tensors = [t for _, t in policy.canonical_tensors()]
    if not leads:
        return None
    whole = torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in tensors]).numpy()
    of_tensors = [tensor_sums(t) for t in tensors]
    return {"buckets": buckets, "sums": sums, "whole": whole, "of_tensors": of_tensors}


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


def published(model: str, settings: dict, folder: str) -> int:
    """Publishes six steps, training between them. There is a relay from step 2 on: each from then on must
    arrive as it was published."""
    policy = MegatronPolicy(tiny.make_config(Path(model), **settings))
    learner = Learner(policy.config, policy)
    controller, publisher = publishing.start(policy.config, Path(folder), policy, dist.get_rank())
    lead, arrived = dist.get_rank() == 0, 0
    for step in range(5):
        if lead and step == 2:
            controller.link(controller.add_relay())
            publishing.linked(publisher)
        publisher.publish(step)
        expected = publishing.whole(policy)
        learner.train(tiny.step_batch(tiny.make_batch(seed=step)), step, publisher.fence)
        if lead and step >= 2:
            arrived += 1
            controller.wait_for(RelayHas, arrived)
            slot = controller.newest(0)
            assert slot.step == step and publishing.slot_bytes(slot) == expected
        dist.barrier()
    publisher.publish(5)
    publisher.close()
    if lead:
        controller.wait_for(RelayHas, 4)
        controller.stop()
    return 4


def published_in_lanes(model: str, settings: dict, folder: str, steps: int = 2) -> dict[str, object]:
    """Trains and publishes through relays of two machines, each rank with those of the lanes that it sends.
    On rank 0 every slot must have the bytes of its step and their sums, and engines of 1 and 2 ranks must
    load them. Returns there what left for relays per publication, and which lanes there were."""
    policy = MegatronPolicy(tiny.make_config(Path(model), **settings))
    learner, rank, lanes = Learner(policy.config, policy), dist.get_rank(), policy.config.relay.lanes
    controller, publisher = publishing.start(policy.config, Path(folder), policy, rank)
    for number, lane in enumerate(policy.lanes):
        if lane.sender == rank:
            controller.link(*(controller.add_relay(machine * lanes + number) for machine in range(2)))
    if rank in policy.publishing.ranks:  # what the others hold comes from its first holders
        publishing.linked(publisher)
    dist.barrier()
    for step in range(steps):
        publisher.publish(step)
        expected, entries = publishing.whole(policy), [tensor_sums(t) for _, t in policy.canonical_tensors()]
        learner.train(tiny.step_batch(tiny.make_batch(seed=step)), step, publisher.fence)
        for machine in range(2 if rank == 0 else 0):
            slot = controller.wait_for_step(machine, step)
            assert slot.step == step and publishing.slot_bytes(slot) == expected
            assert [(e.sum_words, e.sum_indexed) for e in slot.manifest.tensors] == entries
            engine_shards.load(slot, 1 + machine)
        dist.barrier()
    publisher.close()
    told = controller.wait_for(Published, steps) if rank == 0 else []
    dist.barrier()
    controller.stop()
    return {
        "bytes": [p.bytes for p in told],
        "changed": [p.changed for p in told],
        "full": [p.full_bytes for p in told],
        "size": len(expected),
        "senders": [lane.sender for lane in policy.lanes],
        "lanes": [lane.end - lane.begin for lane in policy.lanes],
        "gathered": policy._canonical.gathered_bytes,
    }


def speak() -> dict[str, object]:
    """What a rank hears of the others; in the end rank 0 does not come, for which rank 1 has a second."""
    rank, before = dist.get_rank(), dist.get_pg_count()
    agreement = Agreement(20.0)
    heard: dict[str, object] = {
        "first": control.from_first(b"batch" if rank == 0 else b"", 20.0, "batch 6"),
        "frames": control.all_frames(3 * rank * b"x", 20.0, "the slices"),
        "texts": agreement.gather(f"rank {rank}"),
        "agreed": agreement.first("" if rank == 0 else "damaged"),
        "left": "",
    }
    agreement.meet("the end")
    heard["groups"] = dist.get_pg_count() - before
    if rank == 1:
        try:
            control.from_first(b"", 1.0, "batch 7")
        except LaminarError as error:
            heard["left"] = str(error)
    return heard


def in_chunks(model: str, settings: dict) -> dict[str, dict[str, object]]:
    """One micro-batch with all logits at once and, under a limit of some rows, in chunks: log-probs,
    entropies, gradients, and the elements of the largest tensor that any operation gave."""
    policy = MegatronPolicy(tiny.make_config(Path(model), **settings))
    batch = tiny.examples(tiny.make_batch(seed=1))
    columns, gpt = policy.gpt.output_layer.output_size_per_partition, policy.gpt
    weight = gpt.shared_embedding_or_output_weight() if policy.shape.tied else gpt.output_layer.weight
    found: dict[str, dict[str, object]] = {}
    for name, rows in (("whole", 1 << 20), ("chunks", ROWS)):
        head.LOGITS_BYTES = 4 * columns * rows
        policy._in_chunks = lambda pack, name=name: name == "chunks"
        largest, values = LargestTensor(), []

        def loss(
            micro: MicroBatch,
            logprobs: torch.Tensor,
            entropies: torch.Tensor,
            values: list = values,
            name: str = name,
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            values += [logprobs.detach().clone(), entropies.detach().clone()]
            if name == "chunks":  # as apex's fused product of a micro-batch before would leave it
                weight.grad_added_to_main_grad = True
            weights = torch.linspace(-1, 1, len(logprobs))
            total = (logprobs.exp() * weights).sum() + 0.3 * (entropies * weights.flip(0)).sum()
            return total, torch.ones((), dtype=torch.int), torch.zeros(())

        with largest:
            policy.accumulate([make_microbatch(batch, policy.device)], loss)
        scored = policy.score([make_microbatch(batch, policy.device).pack])
        found[name] = {
            "logprobs": values[0].numpy(),
            "entropies": values[1].numpy(),
            "scored": scored[0].numpy(),
            "gradients": {n: p.main_grad.numpy().copy() for n, p in policy.gpt.named_parameters()},
            "largest": largest.rows_of(columns, policy.shape.hidden),
            "rows": len(values[0]),
        }
    head.LOGITS_BYTES = LOGITS_BYTES
    return found


def entropy_gradients(temperature: float) -> dict[str, float]:
    """The largest deviation of this rank's gradients from autograd's of plain softmax entropies and log-probs
    over the whole vocabulary, of all logits and of chunks; and the largest gradient."""
    tensor = dist.get_world_size()
    if not ps.model_parallel_is_initialized():
        ps.initialize_model_parallel(tensor)
    draw = torch.Generator().manual_seed(0)
    rows, hidden, vocabulary, real = 3 * ROWS + 2, 8, 64, 50  # the rest is padding
    x, weight = torch.randn(rows, hidden, generator=draw), torch.randn(vocabulary, hidden, generator=draw)
    targets = torch.randint(0, real, (rows,), generator=draw)
    slopes = torch.randn(2, rows, generator=draw)
    columns = vocabulary // tensor
    own = slice(columns * ps.get_tensor_model_parallel_rank(), columns * (1 + place()[0]))
    head.LOGITS_BYTES = 4 * columns * ROWS

    def gradients(of: Callable, *inputs: torch.Tensor) -> list[torch.Tensor]:
        leaves = [each.clone().requires_grad_(True) for each in inputs]
        logprobs, entropies = of(*leaves)
        (logprobs * slopes[0] + entropies * slopes[1]).sum().backward()
        return [leaf.grad for leaf in leaves]

    def plain(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logp = ((x @ weight.t()) / temperature)[:, :real].log_softmax(-1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    expected = gradients(plain, x, weight)
    logits = x @ weight.t()
    (of_logits,) = gradients(lambda y: plain(y, torch.eye(vocabulary)), logits)
    (whole,) = gradients(
        lambda y: head.whole_logprobs(y * 1.0, targets, temperature, real), logits[:, own].contiguous()
    )
    chunked = gradients(
        lambda x, w: head.chunked_logprobs(x, w, targets, torch.nn.functional.linear, temperature, real),
        x,
        weight[own].contiguous(),
    )
    head.LOGITS_BYTES = LOGITS_BYTES
    return {
        "whole": float((whole - of_logits[:, own]).abs().max()),
        "hidden": float((chunked[0] - expected[0]).abs().max()),
        "weight": float((chunked[1] - expected[1][own]).abs().max()),
        "largest": float(of_logits.abs().max()),
    }


def divergence_gradients() -> dict[str, float]:
    """The largest deviation of this rank's divergences from two teachers, and of their gradients, in chunks,
    from those of plain softmax over the whole vocabulary in float64, over their largest; and the largest
    gradient."""
    tensor = dist.get_world_size()
    if not ps.model_parallel_is_initialized():
        ps.initialize_model_parallel(tensor)
    draw = torch.Generator().manual_seed(0)
    rows, hidden, vocabulary, real, temperature = 3 * ROWS + 2, 8, 64, 50, 0.7  # the rest is padding
    x, states = (torch.randn(rows, hidden, generator=draw) for _ in range(2))
    weight, *heads = (torch.randn(vocabulary, hidden, generator=draw) / 3 for _ in range(3))
    which, slopes = torch.arange(rows) % 2, torch.randn(rows, generator=draw)
    columns = vocabulary // tensor
    own = slice(columns * ps.get_tensor_model_parallel_rank(), columns * (1 + place()[0]))
    mine = [of.detach()[own].contiguous() for of in heads]
    of_teachers = torch.stack([states.double() @ of.double().t() for of in heads])[which, torch.arange(rows)]
    t = (of_teachers / temperature)[:, :real].softmax(-1)
    found = {"largest": 0.0}
    head.LOGITS_BYTES = 4 * columns * ROWS * 4
    for kind in ("reverse", "forward", "jsd"):
        a, b = x.double().requires_grad_(True), weight.double().requires_grad_(True)
        p = ((a @ b.t()) / temperature)[:, :real].softmax(-1)
        m = (p + t) / 2
        terms = {"reverse": p * (p / t).log(), "forward": t * (t / p).log()}
        terms["jsd"] = (p * (p / m).log() + t * (t / m).log()) / 2
        expected = terms[kind].sum(-1)
        (expected * slopes).sum().backward()
        c, d = x.clone().requires_grad_(True), weight[own].clone().requires_grad_(True)
        teacher = TeacherRows(states, which, mine, kind)
        words = torch.nn.functional.linear, temperature, real, teacher
        _, _, given = head.chunked_logprobs(c, d, which, *words)
        (given * slopes).sum().backward()
        found[f"{kind} value"] = float(((given - expected).abs().max() / expected.max()).detach())
        found[f"{kind} hidden"] = float((c.grad - a.grad).abs().max() / a.grad.abs().max())
        found[f"{kind} weight"] = float((d.grad - b.grad[own]).abs().max() / b.grad.abs().max())
        found["largest"] = max(found["largest"], float(a.grad.abs().max()))
    head.LOGITS_BYTES = LOGITS_BYTES
    return found


class LargestTensor(TorchDispatchMode):
    """Notes the shapes of what operations give, also in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.shapes.add(tuple(result.shape))
        return result

    def rows_of(self, columns: int, weight_rows: int) -> int:
        """The most rows of a tensor [rows, columns] that is not the head's weight, transposed."""
        of_logits = (shape[-2] for shape in self.shapes if len(shape) > 1 and shape[-1] == columns)
        return max((rows for rows in of_logits if rows != weight_rows), default=0)
