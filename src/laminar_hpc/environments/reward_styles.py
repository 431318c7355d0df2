"""How reward functions are called: ours, and those written for TRL or verl, which run unchanged. Called in
reward workers; no torch.

| style | is called as | returns |
|---|---|---|
| laminar | f(prompt=, response=, row=) | a number, or a dict with `reward` and named parts |
| trl | f(prompts=[...], completions=[...], completion_ids=[...], each column=[...]) | [a number or None] |
| verl | f(data_source=, solution_str=, ground_truth=, extra_info=) | a number, or a dict with `score` |

Every style gives back what `checked` makes of it: (reward or None, parts). None means that the function does
not apply to the row.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.rewards import MAX_REWARD
from laminar_hpc.data.rows import field
from laminar_hpc.environments.workers.protocol import Call

MAX_PARTS, MAX_NAME = 100, 200  # of a reward, and characters of the name of each
_OURS = ("prompt", "response", "row")
_TRL = ("prompts", "completions", "completion_ids")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_NEEDED = {"laminar": _OURS, "trl": (_TRL[1],), "verl": (_VERL[1],)}
_WHOSE = {
    "trl": "those of a TRL reward function",
    "verl": "those of verl's compute_score",
    "laminar": "laminar's own",
}
_CALLED_WITH = {
    "laminar": "prompt=, response= and row=",
    "trl": "completions= and the row's columns",
    "verl": "data_source=, solution_str=, ground_truth= and extra_info=",
}
Checked = tuple[float | None, dict[str, float]]


class RewardFault(Exception):
    """A call that failed, in words that need no more explanation. `fault`: see workers/protocol.py."""

    fault = "raised"


class NotAReward(RewardFault):
    """The function returned something else than a reward."""

    fault = "value"


class BadArguments(RewardFault):
    """The function asks for an argument that it cannot be given."""

    fault = "arguments"


def adapted(function: Callable, style: str, label: str, prompt_field: str) -> Callable[[Call], object]:
    """call -> what the function returns (or an awaitable of it). Raises LaminarError when its parameters
    are not of this style."""
    parameters = _parameters(function)
    if parameters is not None:
        _check_signature(parameters, style, label)
    if style == "trl":
        return lambda call: function(**accepted(_trl_arguments(call, prompt_field), parameters))
    if style == "verl":
        return lambda call: function(**accepted(_verl_arguments(call), parameters))
    return lambda call: function(prompt=call.prompt, response=call.response, row=call.row)


def checked(value: object, style: str) -> Checked:
    """Reads what a function returned. Raises NotAReward."""
    if style == "trl":
        return _of_trl(value)
    if style == "verl":
        return _of_verl(value)
    values = value if isinstance(value, dict) else {"reward": value}
    if "reward" not in values:
        raise NotAReward(f"it returned a dict without 'reward': {list(values)!r:.100}")
    numbers_of = {key: _number(key, number) for key, number in _bounded(values).items()}
    return numbers_of.pop("reward"), numbers_of


def style_of(parameters: Mapping[str, inspect.Parameter]) -> str:
    """Whose signature this looks like: trl, verl, laminar, or "" for none of them."""
    if "completions" in parameters:
        return "trl"
    if "solution_str" in parameters:
        return "verl"
    return "laminar" if "response" in parameters else ""


# ---- signatures --------------------------------------------------------------------------------------------


def _parameters(function: Callable) -> Mapping[str, inspect.Parameter] | None:
    """None where Python cannot tell, as of some functions written in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _check_signature(parameters: Mapping[str, inspect.Parameter], style: str, label: str) -> None:
    given = _NEEDED[style]
    missing = [name for name in given if name not in parameters] if not _takes_any(parameters) else []
    if style != "trl":  # which gives each column of the row
        any_number = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        needed = (
            name
            for name, p in parameters.items()
            if p.default is inspect.Parameter.empty and p.kind not in any_number
        )
        missing += [name for name in needed if name not in (_VERL if style == "verl" else _OURS)]
    by_place = inspect.Parameter.POSITIONAL_ONLY
    if not missing and not any(name in parameters and parameters[name].kind is by_place for name in given):
        return
    recognised = style_of(parameters)
    key = label.partition("=")[0].removesuffix(".function") + ".style"
    shown = f"{label}: its parameters ({', '.join(parameters)}) "
    if recognised and recognised != style:
        raise LaminarError(f"{shown}are {_WHOSE[recognised]}: set {key}={recognised}, and it runs as it is")
    raise LaminarError(
        f"{shown}do not fit {key}={style}, which calls it with {_CALLED_WITH[style]}; change them, or set "
        "another style"
    )


def accepted(arguments: dict, parameters: Mapping[str, inspect.Parameter] | None) -> dict:
    """Those that the function takes. Raises BadArguments when it needs others."""
    if parameters is None:
        return arguments
    kept = arguments
    if not _takes_any(parameters):
        kept = {name: value for name, value in arguments.items() if name in parameters}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for name, p in parameters.items():
        if p.kind in named and p.default is inspect.Parameter.empty and name not in kept:
            raise BadArguments(
                f"it asks for '{name}', which the row does not have; it has: {', '.join(arguments)}"
            )
    return kept


# ---- TRL ---------------------------------------------------------------------------------------------------


def _trl_arguments(call: Call, prompt_field: str) -> dict:
    """A batch of one. Prompt and completion are messages where the row's prompt is, as in a conversation."""
    messages = _messages(call.row, prompt_field)
    answer = call.response if messages is None else [{"role": "assistant", "content": call.response}]
    ours = ("prompt", "completion", "completion_ids")
    columns = {key: [value] for key, value in call.row.items() if key not in ours}
    return {
        **columns,
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
        "prompts": [call.prompt if messages is None else messages],
        "completions": [answer],
        "completion_ids": [call.tokens],
    }


def _messages(row: dict, prompt_field: str) -> list | None:
    """The row's prompt where it is a list of messages. `prompt_field` is written as data.prompt_field."""
    try:
        value = field(row, prompt_field, "", "")
    except LaminarError:  # no row of data.train, but of a caller's own
        return None
    return value if isinstance(value, list) else None


def _of_trl(value: object) -> Checked:
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple) or len(values) != 1:
        what = f"{len(values)} of them" if isinstance(values, list | tuple) else type(value).__name__
        raise NotAReward(f"it returned {what} instead of a list with one reward for the one completion")
    return (None if values[0] is None else _number("reward", values[0])), {}


# ---- verl --------------------------------------------------------------------------------------------------


def _verl_arguments(call: Call) -> dict:
    row = call.row
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    truth = row.get("answer", row.get("ground_truth")) if truth is None else truth
    return {
        "data_source": row.get("data_source", ""),
        "solution_str": call.response,
        "ground_truth": truth,
        "extra_info": row.get("extra_info") or {},
    }


def _of_verl(value: object) -> Checked:
    """Its dicts may hold texts, which verl logs; they are left out. Its `acc` is our `accuracy`."""
    if not isinstance(value, dict):
        return _number("score", value), {}
    if "score" not in value:
        raise NotAReward(f"it returned a dict without 'score': {list(value)!r:.100}")
    named = {
        "accuracy" if key == "acc" else key: _number(key, part)
        for key, part in _bounded(value).items()
        if key != "score" and isinstance(part, numbers.Real)
    }
    return _number("score", value["score"]), named


# ---- numbers -----------------------------------------------------------------------------------------------


def _bounded(values: dict) -> dict:
    if len(values) > MAX_PARTS:
        raise NotAReward(
            f"it returned a dict of {len(values)} parts; at most {MAX_PARTS} are kept per trajectory"
        )
    if (longest := max((len(name) for name in values if isinstance(name, str)), default=0)) > MAX_NAME:
        raise NotAReward(
            f"it returned a part with a name of {longest} characters; at most {MAX_NAME} are kept"
        )
    return values


def _number(key: object, value: object) -> float:
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        value = _scalar(value)
    if not isinstance(key, str) or not isinstance(value, numbers.Real):
        raise NotAReward(f"it returned {key!r}: {type(value).__name__} instead of a number")
    number = float(value)
    if not math.isfinite(number):
        raise NotAReward(f"it returned {key}={number}")
    if abs(number) > MAX_REWARD:
        raise NotAReward(f"it returned {key}={number:g}, beyond ±{MAX_REWARD:g}; scale it down")
    return number


def _scalar(value: Any) -> object:
    """A tensor or array of one element as a number; anything else as it is."""
    try:
        return value.item()
    except Exception:  # an object of the user's may raise anything; `_number` refuses what is no number
        return value
