"""What long trajectories take of the trainer: memory per rank with context parallelism, and the time that
data-parallel ranks wait for the slowest. Part of bench/trainer.py, which prints it.

Memory: one trajectory of TOKENS tokens through a training step of the example's model in float32 on the CPU,
by one rank and by two that share it; the larger rank's growth of its resident set from before the step to its
peak, and the bytes of the tensors that autograd has kept at the end of the forward pass. Figure
`context_parallel_memory`: two ranks over one, the larger of both ratios. Goal: at most 0.6.

Waiting: batches of log-normal lengths are planned as trainer/step/packing.py plans them, and each rank's
micro-batches are added up in operations of a 7B. Figure `data_parallel_idle_share`: 1 - mean over ranks /
slowest rank, the mean over mini-batches, for the number of ranks where it is larger;
`data_parallel_idle_share_by_tokens`: the same where ranks are balanced by tokens alone. Goal: below 0.05. A
count, not a time. `..._in_N_stages`: with pipeline stages, which fill all micro-batches of a rank up to the
largest, and a bubble; where a rank has few, its longest trajectory decides its time, however they are dealt.
"""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import common

TOKENS = 16_384
MEDIAN, SIGMA, LONGEST = 1097, 1.7, 32_768  # of responses; those of conf/simulation
PROMPT = 256
BATCHES, MINIBATCHES, BATCH = 8, 4, 2048  # trajectories of a batch
RANKS, STAGES = (8, 32), 4
BUDGET = LONGEST + 1024
SECONDS = 1200.0


def figures() -> dict[str, float]:
    """Of this file."""
    return {**memory(), **waiting()}


# ---- memory ------------------------------------------------------------------------------------------------


def memory() -> dict[str, float]:
    one, two = measured(1), measured(2)
    saved = two["saved"] / one["saved"]
    resident = two["resident"] / one["resident"]
    return {
        "context_parallel_memory": max(saved, resident),
        "context_parallel_saved_bytes": saved,
        "context_parallel_resident_bytes": resident,
        "resident_megabytes_of_one_rank": one["resident"] / 1e6,
    }


def measured(ranks: int) -> dict[str, float]:
    """The largest of each number over so many ranks."""
    # a freed block goes back to the system at once, so that the resident set is what is in use
    own = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    own |= {"CUDA_VISIBLE_DEVICES": "", "MALLOC_TRIM_THRESHOLD_": "65536"}
    with tempfile.TemporaryDirectory(prefix="laminar-context-") as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(ranks), f"{folder}/store"],
                env=own,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank of {ranks} failed; it says above why")
    found = [json.loads(text.splitlines()[-1]) for text in said]
    return {key: max(each[key] for each in found) for key in found[0]}


def one_rank(rank: int, ranks: int, store: str) -> dict[str, float]:
    """In a process of its own: a training step of one long trajectory."""
    import torch
    import torch.distributed as dist

    from laminar_hpc.config.schema import RunConfig
    from laminar_hpc.trainer.megatron.policy import MegatronPolicy
    from laminar_hpc.trainer.step.batch import in_memory
    from laminar_hpc.trainer.step.learner import Learner

    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    config = RunConfig()
    config.model.path = str(common.ROOT / "examples" / "arithmetic" / "base")
    config.trainer.context_parallel = ranks
    config.trainer.tokens_per_microbatch = TOKENS // ranks
    config.algorithm.samples_per_prompt = config.algorithm.minibatches_per_step = 1
    config.guard.enabled = False  # the log-probs of the batch are no engine's
    policy = MegatronPolicy(config)
    learner = Learner(config, policy)
    draw, n = random.Random(0), TOKENS - 8 + 1
    prompt, response = ([draw.randrange(policy.shape.vocab) for _ in range(k)] for k in (8, n))
    batch = in_memory([common.whole(0, 0, prompt, response, [-2.7] * n)])
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.gpt.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor.untyped_storage().nbytes()
        return tensor

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        learner.train(batch, 0, lambda: None)
    return {"saved": sum(kept.values()), "resident": resident("VmHWM") - before}


def resident(name: str) -> int:
    """Bytes, by Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


# ---- waiting -----------------------------------------------------------------------------------------------


def waiting() -> dict[str, float]:
    from laminar_hpc.config.models import even_tokens, known_models

    even = even_tokens(known_models()["Qwen2.5-7B"])
    return {
        "data_parallel_idle_share": max(idle_share(even, even, ranks, 1) for ranks in RANKS),
        "data_parallel_idle_share_by_tokens": max(idle_share(even, math.inf, ranks, 1) for ranks in RANKS),
        **{
            f"data_parallel_idle_share_{ranks}_ranks_in_{STAGES}_stages": idle_share(
                even, even, ranks, STAGES
            )
            for ranks in RANKS
        },
    }


def idle_share(even: float, balance: float, ranks: int, stages: int) -> float:
    """The mean over mini-batches. `even`, `balance`: as `even_tokens` gives it, for what work is and for what
    the plan takes it to be."""
    from laminar_hpc.trainer.step.packing import plan_microbatches, split_minibatches

    found = []
    for batch in range(BATCHES):
        draw = random.Random(batch)
        drawn = (round(draw.lognormvariate(math.log(MEDIAN), SIGMA)) for _ in range(BATCH))
        lengths = [PROMPT + min(LONGEST, max(1, n)) for n in drawn]
        for members in split_minibatches(BATCH, MINIBATCHES, 0, batch):
            own = [lengths[i] for i in members]
            plan = plan_microbatches(own, ranks, BUDGET, balance)
            times = [rank_work([[own[i] for i in part] for part in parts], even, stages) for parts in plan]
            found.append(1 - sum(times) / len(times) / max(times))
    return sum(found) / len(found)


def rank_work(packs: list[list[int]], even: float, stages: int) -> float:
    """A rank's operations on one stage; with several, those of the pipeline's bubble too: p - 1 micro-batches
    more, and each is filled up to the largest."""
    from laminar_hpc.trainer.step.packing import work

    size = max(map(sum, packs)) if stages > 1 else 0
    each = [sum(work(n, even) for n in pack) + max(0, size - sum(pack)) for pack in packs]
    return sum(each) + (stages - 1) * max(each)


if __name__ == "__main__":
    rank, ranks, store = sys.argv[1:]
    print(json.dumps(one_rank(int(rank), int(ranks), store)))
