"""What an engine is started with on a GPU, and what SGLang makes of it on GPUs that are not here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import HELPERS
from laminar_hpc.config.check import check, derive, memory_need
from laminar_hpc.config.directories import conf_directory
from laminar_hpc.config.load import group_names, load_config
from laminar_hpc.config.memory import USABLE, shared_engines
from laminar_hpc.config.models import known_models
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.sglang.command_line import arguments

PROGRAM = HELPERS / "engines/resolved_arguments.py"
EXPERIMENTS = group_names(conf_directory() / "experiment")
GPUS = ("A100", "H100", "B200")
# of bfloat16 with heads of 64 or 128
BACKENDS = {"A10G": "flashinfer", "A100": "flashinfer", "H100": "fa3", "B200": "trtllm_mha"}
GIGABYTES = {"A10G": 24.1, "A100": 85.9, "H100": 85.5, "B200": 192.3}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")


def experiment(name: str, *words: str) -> RunConfig:
    return load_config([f"experiment={name}", "dry_run=true", *words])


def words_of(config: RunConfig, model: Path) -> list[str]:
    return arguments(config, model, "0", 0)


def value(words: list[str], name: str) -> str | None:
    return words[words.index(f"--{name}") + 1] if f"--{name}" in words else None


def test_attention_without_a_kernel_of_its_own_is_tritons() -> None:
    """Promise: float32, which fa3, trtllm_mha and flashinfer refuse, and heads of unusual size run on Triton;
    all else on what SGLang takes for the GPU, and rollout.engine_arguments has the last word."""
    chosen = {
        words: value(words_of(experiment(*words), Path("/m")), "attention-backend")
        for words in (
            ("demo",),  # float32, heads of 32
            ("demo", "model.dtype=bfloat16"),
            ("node_8gpu_7b",),
            ("node_8gpu_7b", "model.dtype=float32"),
            ("node_8gpu_7b", "rollout.engine_arguments.attention_backend=fa3"),
        )
    }
    assert list(chosen.values()) == ["triton", "triton", None, "triton", "fa3"]


def test_few_graphs_of_prefills_and_all_of_decoding() -> None:
    """Promise: an engine captures six prefill graphs and decoding up to all its requests; whoever names
    any graph argument has SGLang's own choice for the rest."""
    words = words_of(experiment("one_gpu", "rollout.max_concurrent=200"), Path("/m"))
    graphs = json.loads(value(words, "cuda-graph-config") or "")
    assert graphs == {"prefill": {"bs": [64, 128, 256, 512, 1024, 2048]}, "decode": {"max_bs": 200}}
    for own in ("disable-prefill-cuda-graph=true", "cuda_graph_max_bs_decode=32"):
        words = words_of(experiment("one_gpu", f"rollout.engine_arguments.{own}"), Path("/m"))
        assert value(words, "cuda-graph-config") is None


def model_folder(config: RunConfig, folder: Path) -> Path:
    """The model of the configuration, or a folder with the config.json that a public one has."""
    if (Path(config.model.path) / "config.json").exists():
        return Path(config.model.path)
    name = Path(config.model.path).name
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps({**known_models()[name], "dtype": "bfloat16"}))
    return folder / name


def holds(gpu: str, config: RunConfig) -> bool:
    """Whether the GPU has the memory that the experiment's file asks for."""
    return GIGABYTES[gpu] >= (config.rollout.gpu_memory_gigabytes or 0)


def test_experts_lie_as_they_are_named() -> None:
    """Promise: an engine of experts runs the kernels whose weights lie as the publications have them, and
    divides experts as rollout.expert_parallel says; one of a dense model is told nothing of experts."""
    words = words_of(experiment("cluster_128gpu_235b_a22b"), Path("/m"))
    assert value(words, "moe-runner-backend") == "triton" and value(words, "expert-parallel-size") == "8"
    dense = words_of(experiment("node_8gpu_7b"), Path("/m"))
    assert value(dense, "moe-runner-backend") is None and value(dense, "expert-parallel-size") is None


@pytest.mark.slow
def test_sglang_takes_every_experiment_on_every_gpu(tmp_path: Path) -> None:
    """Promise: by SGLang's own resolution every file of conf/experiment has, on A100, H100 and B200, a
    backend with kernels for its dtype, overlap scheduling, CUDA graphs and room for its whole KV cache; a GPU
    that trainer and engine share has room for both, whichever starts first."""
    configs = {name: experiment(name) for name in EXPERIMENTS} | {
        "demo bfloat16": experiment("demo", "model.dtype=bfloat16")
    }
    cases = [(gpu, name) for name in configs for gpu in GPUS if holds(gpu, configs[name])]
    cases.append(("A10G", "one_gpu"))
    asked = [(gpu, words_of(configs[name], model_folder(configs[name], tmp_path))) for gpu, name in cases]
    done = subprocess.run(
        [sys.executable, PROGRAM],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for (gpu, name), found in zip(cases, json.loads(done.stdout), strict=True):
        config, where = configs[name], f"{name} on {gpu}: {found}"
        assert (found["device"], found["dtype"]) == ("cuda", config.model.dtype), where
        expected = "triton" if name.startswith(("demo", "tools", "moe", "lora")) else BACKENDS[gpu]
        assert found["attention_backend"] == expected, where
        assert found["page_size"] == (64 if expected == "trtllm_mha" else 1), where
        assert not found["disable_overlap_schedule"] and found["graphs"] >= 32, where
        assert found["max_total_tokens"] == config.rollout.kv_cache_tokens, where
        share, size = found["mem_fraction_static"], GIGABYTES[gpu] * 1e9
        assert all(room >= 0 for room in rooms(config, share, size)), where


def rooms(config: RunConfig, share: float, size: float) -> list[float]:
    """Bytes that are left over for the KV cache by SGLang's arithmetic (kv_cache_configurator.py,
    `_profile_available_bytes`) when what shares the GPU comes before the engine, and while it loads."""
    need = memory_need(config, derive(config))
    engines = shared_engines(config)
    others = need.trainer + (engines - 1) * need.rollout if engines else 0
    before, meanwhile = size - others, size
    return [size - others - need.rollout - (1 - share) * free for free in (before, meanwhile)]


def test_a_shared_gpu_has_room_whichever_comes_first() -> None:
    """Promise: an engine's share of a GPU that trainer and engines use holds its whole KV cache whether they
    come before it or while it starts, by SGLang's arithmetic, also where they just fit; SGLang's own share
    stands elsewhere, and rollout.engine_arguments has the last word."""

    def share_of(config: RunConfig) -> str | None:
        return value(words_of(config, Path("/m")), "mem-fraction-static")

    small = [f"{role}.gpu_memory_gigabytes=22" for role in ("trainer", "rollout")]
    two = ["rollout.replicas=2", "rollout.devices=[0,0]", "rollout.kv_cache_tokens=100000"]
    for words in ([], small, two):
        config = experiment("one_gpu", *words)
        check(config)
        share = float(share_of(config))
        assert share <= USABLE
        assert all(room >= 0 for room in rooms(config, share, config.rollout.gpu_memory_gigabytes * 1e9)), (
            words
        )
    assert share_of(experiment("node_8gpu_7b")) is None
    assert share_of(experiment("one_gpu", "rollout.engine_arguments.mem-fraction-static=0.3")) == "0.3"
