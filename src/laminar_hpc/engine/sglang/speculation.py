"""Speculative decoding on SGLang's command line: our own on the CPU (`rollout.speculation`), SGLang's on GPUs
(`rollout.engine_arguments`) where it changes no distribution."""

from collections.abc import Mapping, Sequence

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig

# mode -> the name under which plugin/speculation.py registers it with SGLang
ALGORITHMS = {mode: f"LAMINAR_{mode.upper()}" for mode in ("ngram", "suffix", "auto")}
DRAFTED = 7  # tokens that a step guesses at most
TEXTS = "laminar_texts"  # in a request's custom_params: its guess_from
# SGLang's whose sampling on CUDA is rejection sampling against the model's own distribution (eagle_utils.py,
# `eagle_sample`), as long as the thresholds are 1
EXACT = ("EAGLE", "EAGLE3", "NEXTN", "NGRAM", "STANDALONE")
_THRESHOLDS = ("speculative-accept-threshold-single", "speculative-accept-threshold-acc")
_KEY = "rollout.engine_arguments.speculative-algorithm"


def asked_for(words: Sequence[str]) -> bool:
    """Whether a command line names one of our algorithms."""
    return not set(ALGORITHMS.values()).isdisjoint(words)


def by_name(sampling: Mapping[str, object]) -> dict[str, object]:
    """SamplingParameters as SGLang takes them; plugin/speculation.py reads TEXTS."""
    named = dict(sampling)
    if texts := named.pop("guess_from", None):
        named["custom_params"] = {TEXTS: texts}
    return named


def arguments(config: RunConfig, on_gpu: bool, routes: bool) -> dict[str, str]:
    """Nothing without speculation. SGLang counts the token that is no guess among the drafts. Raises
    LaminarError where this engine has no verification that is exact, as `refused` says it."""
    for line in refused(config, on_gpu, routes):
        raise LaminarError(line)
    named = {name.replace("_", "-") for name in config.rollout.engine_arguments}
    if "speculative-algorithm" in named and not on_gpu:
        raise LaminarError(
            f"{_KEY}: SGLang's own speculation takes the most probable token on a CPU; "
            "leave it out and set rollout.speculation"
        )
    if config.rollout.speculation == "off":
        return {}
    return {
        "speculative-algorithm": ALGORITHMS[config.rollout.speculation],
        "speculative-num-draft-tokens": str(DRAFTED + 1),
    }


def refused(config: RunConfig, on_gpu: bool, routes: bool) -> list[str]:
    """One line where rollout.speculation is not to be had. `routes`: responses bring them."""
    rollout = config.rollout
    if rollout.speculation == "off":
        return []
    named = {name.replace("_", "-"): value for name, value in rollout.engine_arguments.items()}
    why = ""
    if rollout.engine == "emulated":
        why = "the emulated engine has no tokens to guess; set it to off"
    elif on_gpu:
        why = f"guesses are verified on CPU engines; on GPUs set {_KEY}=EAGLE3 or NGRAM (docs/speculation.md)"
    elif rollout.tensor_parallel > 1:
        why = "each rank would measure for itself whether it pays; set rollout.tensor_parallel=1, or off"
    elif routes:
        why = "routes are told of one token a step; set algorithm.routing_replay=false, or off"
    elif named.get("disable-overlap-schedule") == "false":
        why = "steps that overlap do not know each other's tokens; leave out disable-overlap-schedule"
    return [f"rollout.speculation={rollout.speculation}: {why}"] if why else []


def objection(config: RunConfig, name: str, value: str) -> str:
    """Why SGLang's argument `name`, one of its speculation, cannot be; "" where it can."""
    if name == "speculative-algorithm" and value.upper() not in EXACT:
        return (
            "an engine draws from the model's own distribution and returns its own log-probs, "
            f"which is known of {', '.join(EXACT)}; leave it out"
        )
    if name in _THRESHOLDS and float(value) != 1.0:
        return "below 1 it keeps guesses that the model would not have drawn; leave it out"
    if config.rollout.speculation != "off":
        return "rollout.speculation brings its own; leave it out, or set rollout.speculation=off"
    if config.model.lora.rank:
        return "SGLang's draft models know no adapters; leave it out, or set model.lora.rank=0"
    if config.pipeline.repack != "off" or config.pipeline.refresh == "interrupt":
        # its steps may go beyond a response's end, which a request that is taken out in between shows
        why = "a response that is interrupted may have tokens behind its end"
        return f"{why}; leave it out, or set pipeline.repack=off and no pipeline.refresh=interrupt"
    return ""
