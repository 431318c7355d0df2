"""The rewards of a run, whichever way they are written: `reward.function` alone, or several by name in
`reward.functions`.

Checked before anything starts. Imports no user code, so it does not know whether a function is there:
environments/preflight.py does.
"""

import dataclasses
import os
import re
from urllib.parse import urlsplit

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RewardConfig, RewardFunction

MAX_REWARD = 1e6  # a larger one is a mistake, and its squares would leave float32
FUNCTION_STYLES = ("laminar", "trl", "verl")
URL_STYLES = ("laminar", "sglang")
SINGLE = ""  # the name of reward.function's entry
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def reward_functions(config: RewardConfig) -> dict[str, RewardFunction]:
    """Every reward by its name; reward.function alone has the name "". None: the environment's own."""
    if config.functions:
        return {name: _entry(f"reward.functions.{name}", value) for name, value in config.functions.items()}
    if not config.function:
        return {}
    return {SINGLE: RewardFunction(function=config.function, style=config.style)}


def _entry(key: str, value: object) -> RewardFunction:
    """As written on a command line or in a file. Raises LaminarError for what is no entry."""
    if isinstance(value, RewardFunction):
        return value
    known = [field.name for field in dataclasses.fields(RewardFunction)]
    if not isinstance(value, dict):
        raise LaminarError(
            f"{key}={value!r:.60}: must be {{function: MODULE.FUNCTION, "
            "weight: NUMBER}, or url in place of function"
        )
    if unknown := [str(name) for name in value if name not in known]:
        raise LaminarError(f"{key}.{unknown[0]}: no such key; an entry has {', '.join(known)}")
    weight = value.get("weight", 1.0)
    try:  # a command line may leave it a text
        weight = float(weight) if not isinstance(weight, bool) else None
    except (TypeError, ValueError):
        weight = None
    if weight is None:
        raise LaminarError(f"{key}.weight={value['weight']!r:.60}: must be a number")
    for name, part in value.items():
        if name != "weight" and not isinstance(part, str):
            raise LaminarError(f"{key}.{name}={part!r:.60}: must be a text")
    return RewardFunction(**{**value, "weight": weight})


def label(name: str, entry: RewardFunction) -> str:
    """What messages call it: the key and its value, a URL without its query."""
    value = shown_url(entry.url) if entry.url else entry.function
    return f"reward.functions.{name}={value}" if name else f"reward.function='{value}'"


def shown_url(url: str) -> str:
    """The URL without user, password, query and fragment: those may hold secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def check_reward(config: RewardConfig, own: object = "") -> None:
    """Raises LaminarError for the first thing that cannot work. `own`: there is an environment.factory, agent
    or verifiers, which may have the reward."""
    if config.functions and config.function:
        raise LaminarError(
            f"reward.function={config.function} and reward.functions (of {', '.join(config.functions)}) are "
            "both set: add `reward.function=` to leave the first out, or name it among the others"
        )
    if config.functions and config.style != "laminar":
        raise LaminarError(
            f"reward.style={config.style} is of reward.function; set reward.functions.NAME.style instead"
        )
    if not config.functions and not config.function:
        if own:
            return
        raise LaminarError(
            "reward.function is empty: name a Python function by its dotted path, e.g. "
            "laminar_hpc.environments.arithmetic.reward"
        )
    entries = reward_functions(config)
    for name, entry in entries.items() if config.functions else ():
        _check_entry(name, entry)
    if all(entry.weight == 0 for entry in entries.values()):
        raise LaminarError(
            "reward.functions: every weight is 0, so there is nothing to learn; give one of them a weight"
        )


def _check_entry(name: str, entry: RewardFunction) -> None:
    key = f"reward.functions.{name}"
    if not _NAME.fullmatch(name) or name == "reward":
        raise LaminarError(
            f"{key}: a name has letters, digits, _ and - only, and 'reward' is that of the sum; change it"
        )
    if bool(entry.function) == bool(entry.url):
        raise LaminarError(
            f"{key}: set either {key}.function=MODULE.FUNCTION or {key}.url=http://HOST:PORT/PATH"
        )
    if not abs(entry.weight) <= MAX_REWARD:  # also NaN
        bounds = f"{-MAX_REWARD:.0f} to {MAX_REWARD:.0f}"
        raise LaminarError(f"{key}.weight={entry.weight}: must be a number from {bounds}")
    styles, what = (URL_STYLES, "a URL") if entry.url else (FUNCTION_STYLES, "a function")
    if entry.style not in styles:
        raise LaminarError(f"{key}.style={entry.style}: of {what} it is one of {', '.join(styles)}")
    if entry.url:
        _check_url(key, entry)
    elif entry.api_key_env:
        raise LaminarError(f"{key}.api_key_env is for a url; a function reads its environment itself")


def url_objection(url: str, written: str, key_env: str) -> str:
    """What is wrong with the URL of a server, "" if nothing is; it is to be written as `written`, and its key
    stands in what the setting `key_env` names."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        return f"is not a URL: write it as {written}"
    if "@" in parts.netloc:
        return (
            "holds a user or password, which would stand in the run's files: put the key into an environment "
            f"variable and name that in {key_env}"
        )
    return ""


def _check_url(key: str, entry: RewardFunction) -> None:
    if wrong := url_objection(entry.url, "http://HOST:PORT/PATH", f"{key}.api_key_env"):
        raise LaminarError(f"{key}.url {wrong}")
    if entry.api_key_env and not os.environ.get(entry.api_key_env):
        raise LaminarError(f"{key}.api_key_env={entry.api_key_env}: this environment variable is not set")
