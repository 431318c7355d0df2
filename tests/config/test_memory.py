"""What cannot fit the memory of its GPUs is refused before it starts, and the refusal's own cure helps."""

import re
from dataclasses import replace

import pytest

from laminar_hpc.config.check import check, derive, memory_need
from laminar_hpc.config.directories import conf_directory
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.config.memory import USABLE
from laminar_hpc.config.models import (
    count_parameters,
    known_models,
    kv_bytes_per_token,
    kv_heads,
    kv_tokens_that_fit,
    rollout_bytes,
    trainer_bytes,
)
from laminar_hpc.config.system_schema import TrainerConfig
from laminar_hpc.machine.gpu_memory import check_gpus, host_memory_warning, parse_smi
from laminar_hpc.machine.roles import assign_roles

GPU_EXPERIMENTS = sorted(
    path.stem
    for path in (conf_directory() / "experiment").glob("*.yaml")
    if path.stem not in ("demo", "tools", "moe", "lora")
)
NODE = ["experiment=node_8gpu_7b", "dry_run=true", "trainer.recompute_activations=none"]


def test_the_copy_that_is_published_is_counted():
    """Promise: relay.publish=copied needs room for this rank's share of the weights, and nothing else."""
    plain, copied = (derive(load_config([*NODE, f"relay.publish={how}"])) for how in ("overlapped", "copied"))
    share = copied.trainer_gpu_memory_bytes - plain.trainer_gpu_memory_bytes
    assert share == -(-plain.publish_bytes // 4)


@pytest.mark.parametrize("name", GPU_EXPERIMENTS)
def test_shipped_experiments_name_their_gpus_and_fit(name):
    """Promise: each says how much memory its GPUs have, fits, and would not fit half of it."""
    words = [f"experiment={name}", "dry_run=true"]
    config = load_config(words)
    words += [f"trainer.recompute_activations={check(config).recompute_activations}"]
    assert config.trainer.gpu_memory_gigabytes and config.rollout.gpu_memory_gigabytes
    for role in ("trainer", "rollout"):
        size = getattr(config, role).gpu_memory_gigabytes
        other = {"trainer": "rollout", "rollout": "trainer"}[role]
        with pytest.raises(LaminarError, match="can be used"):
            half = [f"{role}.gpu_memory_gigabytes={size / 2}"]
            check(
                load_config(
                    [
                        *words,
                        *half,
                        *([f"{other}.gpu_memory_gigabytes={size / 2}"] if name.startswith("one_gpu") else []),
                    ]
                )
            )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["trainer.tokens_per_microbatch=40000"],
            r"trainer needs \d+\.\d GB on a GPU, of 80 GB 95% can be used: set (.*)",
        ),
        (
            ["rollout.kv_cache_tokens=1200000"],
            r"rollout needs \d+\.\d GB on a GPU, .*: lower rollout.kv_cache_tokens=1200000 to (\d+)",
        ),
        (
            ["rollout.kv_cache_tokens=9000", "rollout.gpu_memory_gigabytes=12"],
            r"(raise rollout.tensor_parallel=1)",
        ),
        (["trainer.gpu_memory_gigabytes=-1"], r"trainer.gpu_memory_gigabytes=-1: must be above 0"),
        (
            ["rollout.gpu_memory_gigabytes=nan"],
            r"rollout.gpu_memory_gigabytes=nan: must be a finite number, above 0",
        ),
        (
            ["trainer.tokens_per_microbatch=40000", "rollout.kv_cache_tokens=1200000"],
            r"trainer needs (.*); rollout needs",
        ),
    ],
)
def test_a_refusal_names_role_size_and_cure(words, text):
    """Promise: all roles that don't fit in one line."""
    with pytest.raises(LaminarError, match=text):
        check(load_config([*NODE, *words]))


def test_a_cure_that_stands_alone_is_enough():
    """The one setting that a refusal for memory names is enough to be accepted."""
    with pytest.raises(LaminarError) as error:
        check(load_config([*NODE, "trainer.tokens_per_microbatch=33000"]))
    cure = re.search(r"set (\S+)", str(error.value)).group(1)
    check(load_config([*NODE, "trainer.tokens_per_microbatch=33000", cure]))
    with pytest.raises(LaminarError) as error:
        check(load_config([*NODE, "rollout.kv_cache_tokens=2000000"]))
    check(
        load_config(
            [*NODE, f"rollout.kv_cache_tokens={re.search(r' to ([0-9]+)', str(error.value)).group(1)}"]
        )
    )


def test_without_a_size_and_a_gpu_nothing_is_refused():
    """A dry run on a laptop: null is unknown. An emulated engine needs no GPU at all."""
    null = ["trainer.gpu_memory_gigabytes=null", "rollout.gpu_memory_gigabytes=null"]
    check(load_config([*NODE, *null, "rollout.kv_cache_tokens=90000000"]))
    check(load_config([*NODE, "rollout.engine=emulated", "rollout.kv_cache_tokens=90000000"]))


def test_a_teacher_whose_whole_distribution_is_used_takes_room_for_its_logits():
    """Its copy is counted either way; the logits come in chunks, whose weight gradient few tokens would not
    need."""
    path, few = load_config(NODE).model.path, "trainer.tokens_per_microbatch=2048"
    sampled, exact = (
        derive(load_config([*NODE, few, f"teacher.model={path}", f"teacher.divergence={divergence}"]))
        for divergence in ("sampled", "reverse")
    )
    assert 1 << 30 < exact.trainer_gpu_memory_bytes - sampled.trainer_gpu_memory_bytes < 8 << 30


def test_a_shared_gpu_holds_both():
    """Promise: trainer.devices and rollout.devices that overlap are added up."""
    words = r"a GPU shared by trainer and rollouts .*: set trainer.recompute_activations=selective, or lower"
    larger = ["trainer.recompute_activations=none", "trainer.tokens_per_microbatch=5120"]
    with pytest.raises(LaminarError, match=words):
        check(load_config(["experiment=one_gpu", "dry_run=true", *larger]))


def test_the_gpus_of_this_machine_decide_a_real_start():
    """Promise: what the ranks put on each GPU is added up, also where a list is null and replicas come to lie
    on the trainers' GPUs."""
    config = load_config(NODE)
    derived = derive(config)
    here = assign_roles(derived.trainer_ranks, derived.rollout_ranks, 1, derived.world_size)
    check_gpus(config, derived, here, [85.5] * 8)
    with pytest.raises(LaminarError, match=r"GPU 0: a GPU shared by trainer and rollouts needs"):
        check_gpus(config, derived, here, [85.5] * 4)
    with pytest.raises(LaminarError, match=r"trainer needs .* of 48 GB .*can be used"):
        check_gpus(config, derived, here, [48.0] * 8)
    with pytest.raises(
        LaminarError, match=r"rollout needs .* of 48 GB .*can be used: lower rollout.kv_cache_tokens"
    ):
        check_gpus(config, derived, here, [85.5] * 7 + [48.0])
    check_gpus(config, derived, here, [])


def test_sizes_by_nvidia_smi():
    """Promise: in the order of CUDA_VISIBLE_DEVICES, by index or UUID; what is neither is unknown."""
    printed = "0, GPU-aa11, 81559\n1, GPU-bb22, 24564\n"
    assert parse_smi(printed, ["1", "0"]) == pytest.approx([25.757, 85.521], rel=1e-4)
    assert parse_smi(printed, ["GPU-bb"]) == pytest.approx([25.757], rel=1e-4)
    assert (
        parse_smi(printed, ["MIG-1"])
        == parse_smi("", ["0"])
        == parse_smi("0, GPU-aa11, [N/A]\n", ["0"])
        == []
    )


def test_a_run_without_gpus_is_warned_when_the_host_is_too_small():
    """Without a GPU a run that the host's memory cannot hold is warned, a small one not."""
    config = load_config(["experiment=demo"])
    assert host_memory_warning(config, derive(config)) == ""
    large = load_config(["experiment=cluster_1024gpu_72b", "dry_run=true"])
    assert re.search(
        r"has no GPU and \d+\.\d GB of memory left, the run needs about \d+",
        host_memory_warning(large, derive(large)),
    )


def test_kv_tokens_that_fit_is_the_inverse_of_the_estimate():
    """Promise: planner, simulator and refusal count the same KV cache, also beyond one rank per KV head."""
    for name in ("Qwen2.5-7B", "Qwen2.5-32B"):
        model = known_models()[name]
        for tensor in (1, 2, 4, 8):
            weights = 2 * count_parameters(model)
            tokens = kv_tokens_that_fit(weights, kv_bytes_per_token(model, 2), kv_heads(model), tensor, 76e9)
            assert (
                rollout_bytes(model, 2, tensor, tokens) <= 76e9 < rollout_bytes(model, 2, tensor, tokens + 10)
            )


def test_the_fullest_pipeline_stage_has_an_embedding():
    """Promise: embedding and output layer are not spread over the stages."""
    model, one = known_models()["Qwen2.5-7B"], TrainerConfig(pipeline_parallel=28, tokens_per_microbatch=1)
    layers = count_parameters(model) - 2 * 152064 * 3584
    assert trainer_bytes(model, 2, one) == pytest.approx(18 * (layers / 28 + 152064 * 3584), rel=1e-3)
    assert trainer_bytes(model, 2, replace(one, pipeline_parallel=1)) == pytest.approx(
        18 * count_parameters(model), rel=1e-3
    )
    assert USABLE < 1


def test_the_fullest_pipeline_stage_is_that_of_a_run():
    """Promise: where the layers do not divide, the first stage has as many as Megatron is told: 7 of 28 with
    8 stages, not 4."""
    model, eight = known_models()["Qwen2.5-7B"], TrainerConfig(pipeline_parallel=8, tokens_per_microbatch=1)
    layers = count_parameters(model) - 2 * 152064 * 3584
    assert trainer_bytes(model, 2, eight) == pytest.approx(18 * (layers / 4 + 152064 * 3584), rel=1e-3)

    def activations(stages: int) -> int:
        one = replace(eight, pipeline_parallel=stages)
        long = replace(one, tokens_per_microbatch=20_001)
        return trainer_bytes(model, 2, long) - trainer_bytes(model, 2, one)

    assert activations(8) > 1.9 * activations(7), "8 micro-batches of 7 layers, not 7 of 4"
    assert trainer_bytes(model, 2, replace(eight, pipeline_parallel=64)) > 0, "refused elsewhere"


def test_virtual_stages_keep_more_activations():
    """Promise: the fullest stage keeps 1 + (p - 1) / (p v) times the layers' activations of plain stages
    (Narayanan et al., arXiv 2104.04473, section 2.2), and the last stage those of its first v - 1 turns."""
    model = known_models()["Qwen2.5-72B"]
    four = TrainerConfig(tensor_parallel=8, pipeline_parallel=4, tokens_per_microbatch=1)

    def activations(virtual: int) -> int:
        one = replace(four, virtual_stages=virtual)
        return trainer_bytes(model, 2, replace(one, tokens_per_microbatch=30_001)) - trainer_bytes(
            model, 2, one
        )

    layer = activations(1) / 81  # 80 are kept, and one more is on the GPU
    for virtual in (2, 4, 20):
        kept = 80 * (1 + 3 / (4 * virtual)) + 1
        assert activations(virtual) == pytest.approx(kept * layer, rel=0.05)


def test_ranks_that_share_micro_batches_need_less():
    """Promise: with the distributed optimizer they share its state as data-parallel ranks do; their own
    tokens decide the rest, whatever the length of a trajectory."""
    model, one = known_models()["Qwen2.5-7B"], TrainerConfig(tokens_per_microbatch=32_768)
    shared = replace(one, context_parallel=4, tokens_per_microbatch=8192)
    assert shared.pack_tokens == one.pack_tokens and shared.ranks == 4 * one.ranks
    assert trainer_bytes(model, 2, shared) == trainer_bytes(
        model, 2, replace(one, tokens_per_microbatch=8192)
    )
    split = replace(shared, distributed_optimizer=True)
    as_data = replace(split, context_parallel=1, data_parallel=4)
    assert (
        trainer_bytes(model, 2, split) == trainer_bytes(model, 2, as_data) < trainer_bytes(model, 2, shared)
    )


def test_activations_are_recomputed_where_the_estimate_does_not_fit():
    """Promise: trainer.recompute_activations=auto is the first of none, selective and full that fits the
    trainer's share of the GPU, beside an engine too; a choice of the user stands; unknown memory is none."""

    def chosen(*words: str) -> str:
        return derive(load_config(["dry_run=true", *words])).recompute_activations

    def sized(gigabytes: int) -> list[str]:
        return ["experiment=cluster_64gpu_32b", f"trainer.gpu_memory_gigabytes={gigabytes}"]

    assert [chosen(*sized(n)) for n in (141, 80, 70, 40, 24)] == ["none", "none", "selective", "full", "full"]
    assert chosen(*sized(141), "trainer.recompute_activations=selective") == "selective"
    assert chosen("experiment=node_8gpu_7b", "trainer.gpu_memory_gigabytes=null") == "none"
    assert chosen("experiment=one_gpu") == "none"
    assert chosen("experiment=one_gpu", "rollout.kv_cache_tokens=300000") == "selective"


def test_all_that_is_on_a_gpu_is_counted():
    """Promise: relays that use NCCL are counted beside their engine, with their staging; contexts and CUDA
    graphs on a shared GPU, where the cure for the KV cache is enough too."""
    nccl = load_config([*NODE, "relay.transport=nccl"])
    host = load_config([*NODE, "relay.transport=host"])
    relay = memory_need(nccl, derive(nccl)).rollout - memory_need(host, derive(host)).rollout
    assert relay > 5 * (nccl.relay.chunk_megabytes << 20) and relay < 2e9
    one = ["experiment=one_gpu", "dry_run=true", "trainer.recompute_activations=full"]
    with pytest.raises(LaminarError, match="of CUDA's contexts and graphs") as error:
        check(load_config([*one, "rollout.kv_cache_tokens=900000"]))
    tokens = int(re.search(r" to ([0-9]+)", str(error.value)).group(1))
    check(load_config([*one, f"rollout.kv_cache_tokens={tokens}"]))
    with pytest.raises(LaminarError):
        check(load_config([*one, f"rollout.kv_cache_tokens={tokens + 5000}"]))
