"""Configuration: every file under conf/ parses, wrong values are refused in one line that says how to mend
it, before anything starts."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from laminar_hpc.config.check import check, check_machine, derive
from laminar_hpc.config.directories import conf_directory
from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.file_systems import file_system
from laminar_hpc.config.load import dump_config, load_config, read_config
from laminar_hpc.config.models import (
    count_parameters,
    known_models,
    kv_bytes_per_token,
    rollout_bytes,
    trainer_bytes,
)
from laminar_hpc.config.rewards import reward_functions
from laminar_hpc.config.schema import RewardFunction
from laminar_hpc.config.system_schema import TrainerConfig
from laminar_hpc.launch import cli
from laminar_hpc.machine.compat.torchvision import declare_schemas

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@pytest.fixture
def words(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    return [
        f"model.path={tmp_path}",
        f"data.train={tmp_path}/rows.jsonl",
        "reward.function=a.b",
        f"run_dir={tmp_path}/run",
    ]


FILES = sorted(str(p.relative_to(conf_directory())) for p in conf_directory().rglob("*.yaml"))


@pytest.mark.parametrize(
    "file", [file for file in FILES if not file.startswith("simulation/")]
)  # those: tests/simulator/test_commands.py
def test_every_file_parses(file):
    """Every shipped configuration file gives a configuration."""
    group, _, name = file.removesuffix(".yaml").rpartition("/")
    config = load_config([f"{group}={name}"] if group else [])
    assert config.steps > 0


def test_keys_are_those_of_the_list_and_at_most_204():
    """Promise: the configuration stays small enough to be read. A new key is a decision: it goes into
    tests/config/keys.txt by hand."""
    from omegaconf import OmegaConf

    from laminar_hpc.config.schema import RunConfig

    def flat(node, prefix=""):
        for name, value in node.items():
            yield from (
                flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [prefix + name]
            )

    keys = set(flat(OmegaConf.to_container(OmegaConf.structured(RunConfig))))
    listed = (Path(__file__).with_name("keys.txt")).read_text().split()
    assert listed == sorted(set(listed)), "keys.txt is not sorted"
    assert (sorted(keys - set(listed)), sorted(set(listed) - keys)) == ([], []), (
        "keys missing in keys.txt, and keys there that are gone"
    )
    assert len(keys) <= 204


# experiment -> trainer ranks, replicas, GPUs, parameters as published, size of a publication in GB
EXPERIMENTS = {
    "one_gpu": (1, 1, 2, 0.494e9, 1),
    "node_8gpu_7b": (4, 4, 8, 7.616e9, 15),
    "retool_7b": (4, 4, 8, 7.616e9, 15),
    "retool_32b": (16, 4, 32, 32.764e9, 66),
    "cluster_64gpu_32b": (32, 8, 64, 32.764e9, 66),
    "cluster_64gpu_32b_128k": (32, 4, 64, 32.764e9, 66),
    "cluster_1024gpu_72b": (768, 32, 1024, 72.706e9, 145),
    "node_8gpu_30b_a3b": (6, 1, 8, 30.532e9, 61),
    "cluster_128gpu_235b_a22b": (96, 4, 128, 235.094e9, 470),
    "one_gpu_7b_lora": (1, 1, 2, 7.616e9, 0),
    "node_8gpu_72b_lora": (4, 1, 8, 72.706e9, 0),
}
GIGABYTES = {"one_gpu": 24, "one_gpu_7b_lora": 48, "node_8gpu_30b_a3b": 141}  # of a GPU, where it is not 80

SMALL = {"demo", "tools", "moe", "lora"}  # run as they are, on two cores


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_ready_experiments_pass_a_dry_run_without_gpu_and_model(name, capsys):
    """Promise: the shipped layouts fit, say so before anything is downloaded, and name what a run still
    needs."""
    assert cli.run(["train", f"experiment={name}", "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    warned = [line for line in printed.splitlines() if line.startswith("warning")]
    of_routes = [line for line in warned if "GB of routes in a step" in line]
    assert warned == of_routes and len(warned) == (name == "cluster_128gpu_235b_a22b")
    derived = derive(load_config([f"experiment={name}", "dry_run=true"]))
    trainers, replicas, gpus, parameters, gigabytes = EXPERIMENTS[name]
    assert (derived.trainer_ranks, derived.rollout_ranks, derived.gpus_unless_shared) == (
        trainers,
        replicas,
        gpus,
    )
    assert derived.parameters == pytest.approx(parameters, rel=1e-3)
    assert round(derived.publish_bytes / 1e9) == gigabytes
    per_gpu = GIGABYTES.get(name, 80) * 1e9
    shared = derived.trainer_gpu_memory_bytes * name.startswith("one_gpu") + derived.rollout_gpu_memory_bytes
    assert max(derived.trainer_gpu_memory_bytes, shared) < 0.95 * per_gpu
    for words in (
        "trainer gpu memory",
        "rollout gpu memory",
        "kv cache tokens",
        "max staleness",
        "asynchronous",
        " samples = ",
    ):
        assert words in printed
    assert (
        max(len(line) for line in printed.splitlines() if not line.startswith(("before a run", "warning")))
        <= 120
    )
    family = "Qwen3-" if name.endswith(("_a3b", "_a22b")) else "Qwen2.5-"
    assert f"before a run model.path=Qwen/{family}" in printed and "a run downloads it from the" in printed
    assert "before a run data.train=(empty)" in printed
    with pytest.raises(LaminarError, match="a run downloads it"):
        check(load_config([f"experiment={name}"]))


def test_experiments_are_all_tried():
    """Promise: no experiment is shipped that no test has tried."""
    assert {path.stem for path in (conf_directory() / "experiment").glob("*.yaml")} == {*SMALL, *EXPERIMENTS}


def test_memory_estimates():
    """Promise: the estimates are the arithmetic they claim: 18 bytes of state per parameter, 56 KiB of KV per
    token of the 7B."""
    model = known_models()["Qwen2.5-7B"]
    assert kv_bytes_per_token(model, 2) == 56 * 1024
    assert rollout_bytes(model, 2, 1, 1000) - rollout_bytes(model, 2, 1, 0) == 1000 * 56 * 1024
    assert rollout_bytes(model, 2, 8, 1000) - rollout_bytes(model, 2, 8, 0) == 1000 * 56 * 1024 // 4, (
        "four KV heads: copied over eight ranks"
    )
    few = TrainerConfig(tensor_parallel=2, tokens_per_microbatch=1)
    assert trainer_bytes(model, 2, few) == pytest.approx(count_parameters(model) * 18 / 2, rel=1e-3)
    sharded = TrainerConfig(
        tensor_parallel=2, data_parallel=4, distributed_optimizer=True, tokens_per_microbatch=1
    )
    assert trainer_bytes(model, 2, sharded) == pytest.approx(
        count_parameters(model) * (6 / 2 + 12 / 8), rel=1e-3
    )
    long = TrainerConfig(tokens_per_microbatch=16384)
    state, again = count_parameters(model) * 18, dataclasses.replace(long, recompute_activations="full")
    assert trainer_bytes(model, 2, again) - state < 0.3 * (trainer_bytes(model, 2, long) - state)


def test_dump_and_read_give_the_same(words, tmp_path):
    """config.yaml of a run reads back as the same configuration."""
    config = load_config(words)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert read_config(tmp_path / "config.yaml") == config


def test_derived_quantities(words):
    """Ranks, trajectories per step and update, local batches and lanes follow from the configuration."""
    derived = check(load_config([*words, "rollout.replicas=3", "trainer.data_parallel=2"]))
    assert (derived.trainer_ranks, derived.rollout_ranks, derived.world_size) == (2, 3, 7)
    assert (
        derived.trajectories_per_step == 256
        and derived.trajectories_per_update == 128
        and derived.local_batch_groups == 11
    )
    with_lanes = check(load_config([*words, "rollout.replicas=3", "relay.lanes=2"]))
    assert (with_lanes.relay_ranks_per_machine, with_lanes.world_size) == (2, 7)
    with pytest.raises(LaminarError, match=r"relay.lanes=2 needs at least 3"):
        check(load_config([*words, "relay.lanes=2", "relay.slots=2"]))
    assert derived.publish_bytes == 4 * derived.parameters and derived.slot_bytes == 3 * derived.publish_bytes


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_parameters_are_counted_as_transformers_counts_them(family, tied):
    """The parameter count of a model's config.json is transformers' own."""
    declare_schemas()
    import transformers

    shape = {k: v for k, v in MODEL.items() if k != "architectures"} | {"tie_word_embeddings": tied}
    real = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**shape))
    assert count_parameters({**shape, "model_type": family.lower()}) == sum(
        p.numel() for p in real.parameters()
    )


# What one value may be by itself: tests/config/test_refusals.py.
BAD = [
    ("model.path=/nowhere", "no config.json there"),
    ("data.train=/nowhere.jsonl", "no such file"),
    ("data.train=/nowhere/at/all", "no such file or folder, and no name of a Hugging Face dataset"),
    ("evaluation.files=[/nowhere.jsonl]", "evaluation.files=/nowhere.jsonl: no such file"),
    ("evaluation.files=[openai/gsm8k@test,openai/gsm8k@test]", "two of them are called 'openai-gsm8k-test'"),
    ("algorithm.first_samples=9", "must be from 2 to algorithm.samples_per_prompt=8"),
    ("algorithm.more_samples=4", "has no first samples to add to: set algorithm.first_samples too"),
    ("environment.python=/usr/bin/python3", "runs nothing: set environment.factory, tools, agent or"),
    ("reward.function=", "reward.function is empty"),
    (
        "algorithm.minibatches_per_step=3",
        r"= 256 trajectories do not divide into algorithm.minibatches_per_step=3 x trainer.data_parallel=1",
    ),
    ("algorithm.loss=gspo", "set algorithm.loss_aggregation=sequences, not tokens"),
    ("algorithm.loss=aipo", "set algorithm.importance_weight_cap, for example 5"),
    (
        "algorithm.loss=aipo algorithm.importance_weight_cap=5 algorithm.proximal=recomputed",
        "set algorithm.proximal=behaviour",
    ),
    ("algorithm.importance_weight_cap=2", "has no weight to truncate: set algorithm.proximal=recomputed"),
    ("algorithm.clip_dual=1.1", "clip_dual=1.1: must be above 1 . clip_high"),
    ("algorithm.clip_dual=3 algorithm.loss=cispo", "clip_dual=3.0 belongs to algorithm.loss=clip"),
    ("algorithm.sequence_ratio_min=2 algorithm.sequence_ratio_max=0.5", "the first must be below the second"),
    (
        "algorithm.kl_coefficient=0.1 algorithm.kl_estimator=k1",
        "its gradient has mean 0.: use k2 or k3, or algorithm.kl_in_reward=true",
    ),
    ("algorithm.kl_in_reward=true", "does nothing while algorithm.kl_coefficient=0"),
    (
        "algorithm.normalize_std=false algorithm.advantage=rloo",
        "belongs to algorithm.advantage=grpo, not rloo",
    ),
    (
        "algorithm.loss=gspo algorithm.loss_aggregation=sequences algorithm.advantage=reinforce_pp "
        "algorithm.kl_coefficient=0.1 algorithm.kl_in_reward=true",
        "gspo has one advantage per sequence, reinforce_pp with kl_in_reward one per token",
    ),
    ("algorithm.overlong_buffer_tokens=300", "must be at most sampling.max_response_tokens=256"),
    ("sampling.top_p=0.9", "refused for training"),
    ("sampling.top_k=40", "refused for training"),
    ("sampling.min_p=0.1", "refused for training"),
    ("sampling.repetition_penalty=1.1", "refused for training"),
    ("sampling.max_response_tokens=512", "does not leave room for a prompt"),
    ("trainer.devices=[0,0]", r"trainer.devices=\[0,0\]: name each GPU once"),
    (
        "rollout.tensor_parallel=2 rollout.devices=[0,0]",
        r"rollout.devices=\[0,0\]: name each GPU once for a replica",
    ),
    ("rollout.devices=[]", "or leave it at null"),
    (
        "rollout.tensor_parallel=3",
        "does not divide the model's 4 heads, 2 key-value heads and intermediate size 128",
    ),
    (
        "trainer.tensor_parallel=4",
        "trainer.tensor_parallel=4 does not divide the model's num_key_value_heads=2",
    ),
    ("trainer.pipeline_parallel=3", "trainer.pipeline_parallel=3 exceeds the model's num_hidden_layers=2"),
    ("trainer.virtual_stages=2", "trainer.virtual_stages=2: there is one stage; set it to 1, or"),
    (
        "trainer.pipeline_parallel=2 trainer.virtual_stages=2",
        "trainer.virtual_stages=2: 2 chunks of 2 stages do not divide the model's num_hidden_layers=2; "
        "it may be 1",
    ),
    ("trainer.tokens_per_microbatch=100", "cannot hold a prompt"),
    (
        "trainer.tokens_per_microbatch=100 trainer.context_parallel=2",
        "trainer.tokens_per_microbatch=100 x trainer.context_parallel=2 cannot hold a prompt",
    ),
    (
        "trainer.context_parallel=3",
        "trainer.context_parallel=3 x trainer.tensor_parallel=1 does not divide the model's "
        "num_attention_heads=4",
    ),
    ("rollout.kv_cache_tokens=100", "cannot hold one response"),
    ("rollout.replicas_min=2", "is more than rollout.replicas=1"),
    ("pipeline.refresh=barrier pipeline.max_staleness=null", "needs a pipeline.max_staleness"),
    ("cluster.preemption_notice=notice", "write an absolute path, or an address with http:// or https://"),
    ("pipeline.max_staleness=car", "must be a whole number, at least 0, auto or auto:N, or null"),
    ("pipeline.max_staleness=auto:-1", "must be a whole number, at least 0, auto or auto:N, or null"),
    ("pipeline=sync pipeline.repack=kv", "needs pipeline.refresh=drained"),
    ("pipeline.keep_kv=true", "needs pipeline.refresh=interrupt"),
    ("pipeline=versions", "model.lora.rank=0 has none: set model.lora.rank"),
    ("pipeline=versions model.lora.rank=8 pipeline.max_staleness=null", "needs a pipeline.max_staleness"),
    ("environment.agent=a.run", "environment.agent=a.run needs data.chat_template=true"),
    (
        "environment.agent=a.run environment.tools=[b.c] data.chat_template=true",
        "and an agent has its own; leave all but one out",
    ),
    (
        "environment.factory={a:1,b:m.B} data.chat_template=true",
        "environment.factory={a:1,b:m.B}: write a class's dotted path, or several as {NAME: PATH}",
    ),
    ("environment.history=branch", "environment.history=branch: a trajectory has one turn; set environment"),
    ("environment.tools=[a.run,b.run]", r"environment.tools=\[a.run,b.run\] needs data.chat_template"),
    ("environment.factory={a:m.A,b:m.B}", "environment.factory={a:m.A,b:m.B} needs data.chat_template"),
    ("pipeline=stream algorithm.prompts_per_step=33", "divisible by algorithm.minibatches_per_step"),
    ("source=replay:/nowhere", "no store.sqlite"),
    ("relay.lanes=64", "too small for lanes of at least 65536 bytes each; lower it"),
]


def test_adaptive_sampling_has_no_fixed_number_of_trajectories(words):
    """A step's trajectories need not divide into mini-batches then, but there must be enough for each of
    them."""
    check(load_config([*words, "algorithm.first_samples=4", "algorithm.minibatches_per_step=3"]))
    with pytest.raises(
        LaminarError, match=r"= 4 trajectories are fewer than algorithm.minibatches_per_step=5"
    ):
        check(
            load_config(
                [
                    *words,
                    "algorithm.first_samples=2",
                    "algorithm.prompts_per_step=2",
                    "algorithm.minibatches_per_step=5",
                ]
            )
        )


@pytest.mark.parametrize(("word", "text"), BAD)
def test_wrong_values_are_refused_in_one_line(words, word, text):
    """A wrong value is refused in one short line."""
    with pytest.raises(LaminarError, match=text) as error:
        check(load_config([*words, *word.split()]))
    assert "\n" not in str(error.value) and len(str(error.value)) < 320


def test_other_architectures_are_refused(words, tmp_path):
    """A model family that is not supported is refused by name, with those that are."""
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "architectures": ["DeepseekV3ForCausalLM"]}))
    with pytest.raises(
        LaminarError, match=r"DeepseekV3ForCausalLM is not supported; supported: Gemma3.*Llama.*Qwen3Moe"
    ):
        check(load_config(words))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "is no JSON object"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("{" * 3, "cannot be read as JSON"),
        ({"architectures": "Qwen2ForCausalLM"}, "architecture unknown is not supported"),
        ({"architectures": [{}]}, r"architecture \{\} is not supported"),
        ({"hidden_size": True}, "has no hidden_size"),
        ({"num_key_value_heads": "two"}, "num_key_value_heads='two' is not a number of 1 or more"),
        ({"head_dim": -1}, "head_dim=-1 is not a number of 1 or more"),
        ({"max_position_embeddings": [4096]}, r"max_position_embeddings=\[4096\] is not a number"),
    ],
)
def test_an_odd_config_json_is_refused_in_one_line(words, tmp_path, text, says):
    """A damaged config.json is refused by name in one line, whatever is in it."""
    written = text if isinstance(text, str) else json.dumps({**MODEL, **text})
    (tmp_path / "config.json").write_text(written)
    with pytest.raises(LaminarError, match=says) as error:
        check(load_config(words))
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_port_in_use_and_too_little_shared_memory(words, tmp_path):
    """A port in use and too little shared memory are refused before the run, with the cure."""
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = load_config([*words, f"cluster.port={other.getsockname()[1]}"])
        with pytest.raises(LaminarError, match="choose another, or 0 for any free one"):
            check_machine(config, derive(config))
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "vocab_size": 10**10}))
    config = load_config(words)
    with pytest.raises(
        LaminarError, match=r"weight slots need \d+ MB: give it more \(containers: --shm-size\)"
    ):
        check_machine(config, derive(config))


def test_file_system_of_a_path():
    """The file system of a path is told by its name."""
    assert file_system(Path("/dev/shm")) == "tmpfs" and re.fullmatch(r"[\w.]+", file_system(Path("/")))


@pytest.mark.parametrize(
    "words",
    [
        ["reward.functions.right.function=my.f", "reward.functions.right.weight=0.5"],
        ["+reward.functions.right.function=my.f", "+reward.functions.right.weight=0.5"],
        ["reward.functions={right:{function:my.f,weight:0.5}}"],
    ],
)
def test_rewards_by_name_are_written_plainly(words, tmp_path):
    """Several rewards stand on the command line without Hydra's signs, and in a run's own config.yaml."""
    config = load_config(words)
    assert reward_functions(config.reward) == {"right": RewardFunction(function="my.f", weight=0.5)}
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert reward_functions(read_config(tmp_path / "config.yaml").reward) == reward_functions(config.reward)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("rollout.replicas=3:1", "or MIN:MAX with MIN at most MAX"),
        ("rollout.replicas=0:2", "must be a whole number, at least 1 and at most 65,536, or MIN:MAX"),
        ("rollout.replicas=2:", "or MIN:MAX with MIN at most MAX"),
        ("rollout.replicas=2:70000", "or MIN:MAX with MIN at most MAX"),
        ("rollout.replicas=2:4 rollout.replicas_min=3", "is more than rollout.replicas=2:4"),
        ("rollout.replicas=2:4 cluster.scale_command=/no/such", "no such program here"),
        ('rollout.replicas=2:4 cluster.scale_command="a \'b"', "cannot be read as words"),
        ("cluster.scale_command=/bin/true", "has no effect with rollout.replicas=1; write MIN:MAX"),
    ],
)
def test_wrong_spans_of_replicas_are_one_line(word, text):
    """And nothing else is said."""
    with pytest.raises(Refused) as refused:
        check(load_config(["experiment=demo", *shlex.split(word)]))
    (line,) = str(refused.value).splitlines()
    assert text in line


def test_a_span_of_replicas_is_checked_for_its_largest_number(tmp_path):
    """Ranks, GPUs and room in memory are those of MAX, local batches those of MIN, with which it begins."""
    words = ["experiment=demo", "algorithm.prompts_per_step=32"]
    span, most, fewest = (check(load_config([*words, f"rollout.replicas={n}"])) for n in ("2:4", "4", "2"))
    assert (span.rollout_ranks, span.world_size, span.gpus_unless_shared) == (
        most.rollout_ranks,
        most.world_size,
        most.gpus_unless_shared,
    )
    assert span.local_batch_groups == fewest.local_batch_groups == 16
    (tmp_path / "config.yaml").write_text(dump_config(load_config([*words, "rollout.replicas=2:4"])))
    assert read_config(tmp_path / "config.yaml").rollout.most == 4


def test_a_span_in_a_file_is_quoted(tmp_path):
    """YAML would read 2:8 as 128 seconds."""
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\nrollout:\n  replicas: 2:8  # of eight GPUs\n")
    with pytest.raises(Refused, match=r'mine.yaml: YAML reads 2:8 as a time; write "2:8" in quotes'):
        load_config(["--config-dir", str(tmp_path), "experiment=mine"])
    file.write_text('# @package _global_\nrollout:\n  replicas: "2:8"\n')
    assert load_config(["--config-dir", str(tmp_path), "experiment=mine"]).rollout.most == 8
