"""Names of the objectives that are shipped, and the keys of `algorithm.options` that each reads. Imports no
torch; the functions are in trainer/algorithms/, one for each name.

A name with a dot in it is a function of the user's own, by its dotted path; it reads what it likes of
`algorithm.options`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from laminar_hpc.config.bounds import Bounds
from laminar_hpc.config.errors import did_you_mean

ADVANTAGES = (
    "grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "grpo_batch_std",
    "opo",
    "max_rl",
    "gdpo",
)
GAE = "gae"  # the advantage that needs a critic
LOSSES = ("clip", "gspo", "cispo", "aipo", "dppo", "sapo", "gmpo")
SEQUENCE_LOSSES = ("gspo", "gmpo")  # one ratio and one advantage per trajectory
WEIGHTS = ("tis", "icepop", "sequence_tis", "sequence_icepop")  # in place of q / mu
CORRECTIONS = (*WEIGHTS, "opsm", "overlong_filter")


@dataclass(frozen=True)
class Option:
    """A number of `algorithm.options`: its default and bounds."""

    default: float
    bounds: Bounds


_FLOOR = {"importance_weight_floor": Option(0.0, Bounds(at_least=0))}
OPTIONS: dict[str, dict[str, Option]] = {  # by the name of what reads it
    "sapo": {
        "sapo_temperature_good": Option(1.0, Bounds(above=0, at_most=1000)),
        "sapo_temperature_bad": Option(1.05, Bounds(above=0, at_most=1000)),
    },
    GAE: {
        "gamma": Option(1.0, Bounds(above=0, at_most=1)),
        "gae_lambda": Option(1.0, Bounds(at_least=0, at_most=1)),
        "gae_lambda_value": Option(1.0, Bounds(at_least=0, at_most=1)),
        "gae_alpha": Option(0.0, Bounds(at_least=0)),
        "value_clip": Option(0.5, Bounds(at_least=0)),
    },
    "opsm": {"opsm_divergence": Option(1e-4, Bounds(at_least=0))},
    **dict.fromkeys(WEIGHTS, _FLOOR),
}


def is_own(name: str) -> bool:
    """Whether it is a function of the user's own."""
    return "." in name


def option(options: Mapping[str, float], reader: str, key: str) -> float:
    """The value of a key that `reader` reads, or its default."""
    return float(options.get(key, OPTIONS[reader][key].default))


def wrong_options(options: Mapping[str, object], used: list[str]) -> Iterator[str]:
    """Yields what is wrong with `algorithm.options`, when these advantages, losses and corrections are used;
    keys that only a function of the user's own may read are not looked at."""
    known = {key: each for name in used for key, each in OPTIONS.get(name, {}).items()}
    for key, value in options.items():
        if key not in known:
            if any(is_own(name) for name in used):
                continue
            readers = [name for name, keys in OPTIONS.items() if key in keys]
            why = f"it is read by {', '.join(readers)}" if readers else f"known are {_all_keys()}"
            yield f"algorithm.options.{key}: nothing here reads it; {why}{did_you_mean(key, known)}"
            continue
        bounds = known[key].bounds
        if isinstance(value, bool) or not isinstance(value, int | float) or not bounds.hold(value):
            yield f"algorithm.options.{key}={value!r:.40}: must be a number, {bounds.words()}"


def _all_keys() -> str:
    return ", ".join(sorted({key for keys in OPTIONS.values() for key in keys}))
