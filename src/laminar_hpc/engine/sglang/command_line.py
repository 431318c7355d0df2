"""SGLang's command line: what an engine is started with, and which names SGLang knows.

`rollout.engine_arguments` goes to SGLang as it is; an unknown name would end the run half a minute later. The
names are read from SGLang's source text: importing it takes seconds.
"""

import importlib.util
import json
import re
from contextlib import suppress
from pathlib import Path

from laminar_hpc.config.adapter_places import adapters_at_once
from laminar_hpc.config.adapters import TARGETS
from laminar_hpc.config.check import derive, memory_need
from laminar_hpc.config.determinism import refuse_on_cpu, refuse_on_gpu
from laminar_hpc.config.errors import LaminarError, did_you_mean
from laminar_hpc.config.experts import experts_of
from laminar_hpc.config.kv_moves import MOVED_PAGE, keeps_cache
from laminar_hpc.config.memory import USABLE, shared_bytes, shared_engines
from laminar_hpc.config.models import head_size, model_config
from laminar_hpc.config.routing import replayed_routes, replays, route_shape
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.sglang import speculation
from laminar_hpc.engine.sglang.overrides import overrides
from laminar_hpc.machine.devices import present

HEAD_SIZES = (64, 128, 256)  # that all of SGLang's compiled attention backends have
# Tokens of a prefill that is one CUDA graph. SGLang's own choice has 58 sizes, a second of a start each.
PREFILL_GRAPHS = (64, 128, 256, 512, 1024, 2048)
_MIN_NAMES = 100  # fewer mean that this version of SGLang declares them in another way
_PRIVATE = (
    *("host", "port", "api-key", "admin-api-key", "ssl-keyfile", "ssl-certfile"),
    *("grpc-port", "grpc-mode", "smg-grpc-mode", "tokenizer-worker-num"),  # servers that ask for no key
)
# of which the run has its own idea: two would give ranks without weights, weights of another kind, or engines
# that all draw alike
_OURS = {
    **dict.fromkeys(("tp-size", "tensor-parallel-size"), "rollout.tensor_parallel"),
    **dict.fromkeys(("ep", "ep-size", "expert-parallel-size"), "rollout.expert_parallel"),
    **dict.fromkeys(("dp-size", "data-parallel-size"), "rollout.replicas"),
    **dict.fromkeys(("model", "model-path"), "model.path"),
    "dtype": "model.dtype",
    "enable-return-routed-experts": "algorithm.routing_replay",
    "random-seed": "seed",
    **dict.fromkeys(("enable-lora", "max-lora-rank"), "model.lora.rank"),
    "lora-target-modules": "model.lora.targets",
    "lora-paths": "model.lora.path",
    **dict.fromkeys(("max-loras-per-batch", "max-loaded-loras"), "pipeline.max_staleness"),
}
# names, or with a dash at the end what names begin with -> why an engine with them could serve no run
_NOT_HERE = {
    "pp-size pipeline-parallel-size nnodes dcp-size decode-context-parallel-size attn-cp-size "
    "attention-context-parallel-size enable-dp-attention": "weights and KV caches are divided over "
    "tensor-parallel ranks only; set rollout.tensor_parallel",
    "quantization quantize-and-serve modelopt-quant rl-quant-profile": "the engine takes the trainer's "
    "weights as they are, in model.dtype, for which it has no place when it is quantized",
    "enable-multi-layer-eagle uno-lora-path decoupled-spec- disaggregation-mode is-embedding encoder-only "
    "dllm-algorithm": "an engine generates by itself and returns its own log-probs",
    "moe-runner-backend moe-a2a-backend enable-eplb ep-num-redundant-experts init-expert-location": "experts "
    "are loaded in the layout of SGLang's triton kernels, each once",
    "preferred-sampling-params": "responses are drawn as `sampling` says",
}
_NO_ROUTES = ("enable-hierarchical-cache", "enable-lmcache", "enable-hisparse")
_FIELD = re.compile(r"^    ([a-z]\w+)\s*:", re.M)
_FLAG = re.compile(r"[\"']--([a-z][\w-]+)[\"']")


def argument_names() -> set[str]:
    """Names as on SGLang's command line, without dashes: rather too many. Empty where they cannot be read."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return set()
    folder = Path(spec.submodule_search_locations[0]) / "srt"
    names: set[str] = set()
    for file in (folder / "server_args.py", *(folder / "arg_groups" / "fields").glob("*.py")):
        if file.is_file():
            text = file.read_text()
            names |= {name.replace("_", "-") for name in _FIELD.findall(text)} | set(_FLAG.findall(text))
    return names if len(names) >= _MIN_NAMES else set()


def refused_arguments(config: RunConfig) -> list[str]:
    """One line for each entry of rollout.engine_arguments that SGLang does not have, that has a key of ours,
    that would open an engine to others, or with which it could not serve a run; and for a rollout.speculation
    that is not to be had."""
    lines = speculation.refused(config, has_cuda(), _brings_routes(config))
    if config.rollout.engine != "sglang":
        return lines
    names = argument_names() if config.rollout.engine_arguments else set()
    found = (
        (key, _refusal(config, _full_name(key, names), value, names))
        for key, value in config.rollout.engine_arguments.items()
    )
    return lines + [f"rollout.engine_arguments.{key}: {why}" for key, why in found if why]


def _full_name(key: str, names: set[str]) -> str:
    """SGLang's argparse takes unique beginnings too."""
    name = key.replace("_", "-")
    fits = [known for known in names if known.startswith(name)]
    return fits[0] if name not in names and len(fits) == 1 else name


def _refusal(config: RunConfig, name: str, value: str, names: set[str]) -> str:
    """Why it cannot be, and the cure; "" where it can."""
    if name in _PRIVATE:
        return "where engines listen, and with which key, is the run's own; leave it out (docs/security.md)"
    if name in _OURS:
        return f"set {_OURS[name]} and leave it out"
    if names and not {name, name.removeprefix("no-")} & names:
        return f"SGLang's server has no argument --{name}{did_you_mean(name, names)}"
    if value == "false":  # then it is left out
        return ""
    for those, why in _NOT_HERE.items():
        if any(name == one or (one.endswith("-") and name.startswith(one)) for one in those.split()):
            return f"{why}; leave it out"
    if name.startswith("speculative-") and (why := speculation.objection(config, name, value)):
        return why
    if (why := _without_routes(name, value)) and _brings_routes(config):
        return f"{why}; leave it out, or set algorithm.routing_replay=false"
    if keeps_cache(name, value) and config.pipeline.repack == "kv":
        return (
            "pipeline.repack=kv moves caches of 16 or 32 bits, by pages of at most "
            f"{MOVED_PAGE} tokens, from prefix cache to prefix cache; leave it out, or set "
            "pipeline.repack=reprefill"
        )
    return ""


def _without_routes(name: str, value: str) -> str:
    """Why an engine with this argument could not tell the experts of all tokens; "" where it can."""
    if name in _NO_ROUTES:
        return "KV that comes back from elsewhere has no routes"
    unbounded = name == "chunked-prefill-size" and value.startswith("-")
    return "SGLang has room for the routes of one chunk of a prefill" if unbounded else ""


def _brings_routes(config: RunConfig) -> bool:
    """Whether responses bring routes. A model that cannot be read is refused elsewhere."""
    with suppress(LaminarError):
        return replays(config) and bool(route_shape(model_config(config.model.path, config.dry_run)))
    return False


def has_cuda() -> bool:
    """Whether the engine will run on a GPU: the platform plugin's question, without importing torch."""
    return bool(present())


def _attention(config: RunConfig) -> dict[str, str]:
    """The attention backend where SGLang's own choice for the GPU (model_override_base.py:281: fa3,
    trtllm_mha or flashinfer) has no kernel: for float32, and for heads of unusual size; and where a token
    is to follow from its prefix, whatever the GPU."""
    model = model_config(config.model.path, config.dry_run)
    fits = config.model.dtype != "float32" and head_size(model) in HEAD_SIZES
    return {} if fits and not config.model.deterministic else {"attention-backend": "triton"}


def _memory_share(config: RunConfig) -> dict[str, str]:
    """On a GPU that a trainer uses too: the share of its memory that the trainer and all engines there come
    to. SGLang takes its KV cache from what is free now, less the other share of what was free before it
    loaded its weights (kv_cache_configurator.py, `_profile_available_bytes`), so kv_cache_tokens fit whether
    the others come before, after or meanwhile. Elsewhere SGLang's own choice stands."""
    engines = shared_engines(config)
    gigabytes = config.rollout.gpu_memory_gigabytes or config.trainer.gpu_memory_gigabytes
    if not engines or not gigabytes:
        return {}
    share = shared_bytes(memory_need(config, derive(config)), engines) / (gigabytes * 1e9)
    return {"mem-fraction-static": f"{min(share, USABLE):.3f}"}


def _experts(config: RunConfig) -> dict[str, str]:
    """Of a mixture of experts: how it is divided, whether it tells which experts its tokens went to, and on a
    GPU kernels whose weights lie as they are named (unquant.py:722 shuffles them for others)."""
    model = model_config(config.model.path, config.dry_run)
    if experts_of(model) is None:
        return {}
    size = {"expert-parallel-size": str(config.rollout.expert_parallel)}
    if replayed_routes(config, model) is not None:
        size["enable-return-routed-experts"] = "true"
    return size | ({"moe-runner-backend": "triton"} if has_cuda() else {})


def _graphs(config: RunConfig) -> dict[str, str]:
    """Which CUDA graphs an engine captures: few of prefills, and of decoding up to all requests that it may
    have at once, where SGLang takes 8 to 48 on GPUs below 60 GB. Nothing where the user names any of them, as
    this argument would come before the user's (cuda_graph_hook.py, `_parse_cuda_graph_config`)."""
    if any("cuda-graph" in key.replace("_", "-") for key in config.rollout.engine_arguments):
        return {}
    graphs = {"prefill": {"bs": PREFILL_GRAPHS}, "decode": {"max_bs": config.rollout.max_concurrent}}
    return {"cuda-graph-config": json.dumps(graphs)}


def _adapters(config: RunConfig) -> dict[str, str]:
    """A place for each adapter that may be loaded, and one without, in which SGLang has the base. Nothing is
    evicted: the adapters are pinned (plugin/adapters.py). On a GPU decoding stays in CUDA graphs, which read
    the places' tensors; a prefill's graph takes SGLang's own backend for it, csgmv, which is the default."""
    lora = config.model.lora
    if not lora.rank:
        return {}
    values = {
        "enable-lora": "true",
        "max-loras-per-batch": str(adapters_at_once(config.pipeline) + 1),
        "max-lora-rank": str(lora.rank),
    }
    return values if has_cuda() else values | {"lora-backend": "torch_native"}


def arguments(config: RunConfig, directory: Path, weight_version: str, seed: int) -> list[str]:
    """The words behind the program's name, without host, port and key."""
    rollout = config.rollout
    values = {
        "model-path": str(directory),
        "weight-version": weight_version,
        "dtype": config.model.dtype,
        "random-seed": str(seed),
        "tensor-parallel-size": str(rollout.tensor_parallel),
        "max-total-tokens": str(rollout.kv_cache_tokens),
        "max-running-requests": str(rollout.max_concurrent),
        "log-level-http": "warning",  # one line per request would be most of the log
        "skip-tokenizer-init": "true",
        # it sleeps a second first; the probe of the first verification warms up as well
        "skip-server-warmup": "true",
        "sleep-on-idle": "true",
    }
    if config.model.float32_head and config.model.dtype != "float32":
        values["enable-fp32-lm-head"] = "true"
    if config.model.deterministic:
        (refuse_on_gpu if has_cuda() else refuse_on_cpu)(config)
        values["enable-deterministic-inference"] = "true"
    if rollout.increment_tokens:
        values["incremental-streaming-output"] = "true"
    values |= speculation.arguments(config, has_cuda(), _brings_routes(config))
    values |= (
        _experts(config) | _adapters(config) | overrides(model_config(config.model.path, config.dry_run))
    )
    if has_cuda():
        values |= _attention(config) | _memory_share(config) | _graphs(config)
    else:
        # A whole batch of short prompts is prefilled at once; the KV cache is bounded by max-total-tokens,
        # not by a share of memory.
        values |= {
            "device": "cpu",
            "chunked-prefill-size": "16384",
            "max-prefill-tokens": "16384",
            "mem-fraction-static": "0.8",
            # nothing overlaps on the same cores: it costs a wasted row per response
            "disable-overlap-schedule": "true",
        }
        if config.model.deterministic:  # SGLang looks at it before it asks the platform
            values["attention-backend"] = "torch_native"
    values |= {key.replace("_", "-"): value for key, value in rollout.engine_arguments.items()}
    words: list[str] = []
    for key, value in values.items():
        if value != "false":
            words += [f"--{key}"] if value == "true" else [f"--{key}", value]
    if config.model.lora.rank:  # the one that takes several words
        words += ["--lora-target-modules", *TARGETS[config.model.lora.targets]]
    return words
