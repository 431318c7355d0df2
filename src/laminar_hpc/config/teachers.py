"""The teachers of a run, by name, whichever way `teacher.model` is written, and what cannot work with them.
Imports no torch.

A teacher's model of the policy's architecture is a directory; any other one stands behind a URL.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.learning_schema import TeacherConfig
from laminar_hpc.config.models import SHAPE, model_config, vocabulary
from laminar_hpc.config.objectives import SEQUENCE_LOSSES
from laminar_hpc.config.rewards import url_objection
from laminar_hpc.config.schema import RunConfig

FIELD = "teacher"  # of a row, that names its teacher where there are several
SAMPLED = "sampled"  # the divergence that needs no more of a teacher than log-probs of drawn tokens
SINGLE = ""  # the name of a teacher that is alone
_NUMBERS = (*SHAPE, "head_dim", "rope_theta", "rope_scaling", "rms_norm_eps")


def teachers_of(config: TeacherConfig) -> dict[str, str]:
    """Directory or URL by name; none without a teacher."""
    if isinstance(config.model, dict):
        return {str(name): model for name, model in config.model.items()}
    return {SINGLE: config.model} if config.model else {}


def is_server(model: str) -> bool:
    """Whether the teacher is asked, and not computed on the trainer ranks."""
    return "://" in model


def held_teachers(config: TeacherConfig) -> int:
    """How many copies of a model the trainer ranks hold for teachers."""
    return sum(not is_server(model) for model in teachers_of(config).values())


def teacher_of(row: dict[str, Any], names: list[str], where: str) -> str:
    """The teacher of a row. Raises LaminarError, with `where` the row is, when it names none of `names`."""
    if len(names) == 1:
        return names[0]
    named = row.get(FIELD)
    if named not in names:
        raise LaminarError(
            f"{where}: the field {FIELD!r} is {named!r:.60}, and teacher.model has {', '.join(names)}; name "
            "one of them in each row"
        )
    return str(named)


def check_rows(config: TeacherConfig, rows: Iterable[dict[str, Any]]) -> None:
    """Raises LaminarError for the first row that names no teacher where there are several."""
    names = list(teachers_of(config))
    for number, row in enumerate(rows if len(names) > 1 else ()):
        teacher_of(row, names, f"data.train, row {number + 1} of those kept")


def wrong_teachers(config: RunConfig, policy: dict[str, Any] | None) -> Iterator[str]:
    """What is wrong with `teacher`, one line each, in the way of rules.py; `policy`: the config.json of
    model.path, None where it cannot be read."""
    named = teachers_of(config.teacher)
    for name, model in named.items():
        key = _key(name)
        if not isinstance(model, str) or not model:
            yield f"{key}={model!r:.60}: write a directory or a URL, or several as {{NAME: MODEL}}"
        elif is_server(model):
            yield from _wrong_url(config, key, model)
    if not named:
        return
    if not config.dry_run and policy is not None:
        yield from other_models(config, policy)
    if config.model.lora.rank and held_teachers(config.teacher):
        yield (
            "@model.lora.rank: beside an adapter a trainer rank holds one model's weights, no teacher's: put "
            "it behind an SGLang or vLLM server, and name its URL"
        )
    a = config.algorithm
    exact = config.teacher.divergence != SAMPLED
    if exact and held_teachers(config.teacher) < len(named):
        yield (
            "@teacher.divergence: a server gives log-probs of drawn tokens alone; set it to sampled, or name "
            "directories"
        )
    if a.loss in SEQUENCE_LOSSES and not exact:
        yield "@algorithm.loss has one advantage per sequence, a teacher one per token: use another loss"
    if a.zero_variance == "filter" and config.teacher.rewards == 0:
        yield (
            "@algorithm.zero_variance leaves out groups by rewards that @teacher.rewards does not train; use "
            "keep"
        )
    if len(named) > 1 and config.source != "rollout":
        yield "@source: a replay has no rows to say which of several teachers a prompt has; name one"


def _wrong_url(config: RunConfig, key: str, url: str) -> Iterator[str]:
    if wrong := url_objection(url, "http://HOST:PORT", "teacher.api_key_env"):
        yield f"{key} {wrong}"
    variable = config.teacher.api_key_env
    if variable and not config.dry_run and not os.environ.get(variable):
        yield "@teacher.api_key_env: this environment variable is not set"
    if config.sampling.temperature != 1:
        yield (
            f"@sampling.temperature: the server of {key} gives log-probs at temperature 1; set it to 1, or "
            "name a directory"
        )


def other_models(config: RunConfig, policy: dict[str, Any]) -> Iterator[str]:
    """Teachers' directories that are not there, or that the trainer cannot compute in the policy's place."""
    for name, model in teachers_of(config.teacher).items():
        if isinstance(model, str) and model and not is_server(model):
            yield from _another_model(config, _key(name), model, policy)


def _key(name: str) -> str:
    return f"teacher.model.{name}" if name else "teacher.model"


def _another_model(config: RunConfig, key: str, path: str, policy: dict[str, Any]) -> Iterator[str]:
    if what := unlike(path, policy, "tie_word_embeddings"):
        yield (
            f"{key}={path}: {what}; name a Hugging Face directory of the policy's architecture, or put "
            "another model behind an SGLang or vLLM server and name its URL"
        )
        return
    own, other = (Path(each) / "tokenizer.json" for each in (config.model.path, path))
    if vocabulary(own) != vocabulary(other):
        yield f"{key}={path}: its tokenizer.json has other tokens than the policy's; choose another teacher"


def unlike(path: str, policy: dict[str, Any], *more: str) -> str:
    """The first number of config.json, or key in `more`, in which a directory is not the policy's model; ""
    where it can be computed with the policy's layers."""
    try:
        model = model_config(path)
    except LaminarError:
        return "there is no config.json"
    names = (name for name in (*_NUMBERS, *more) if model.get(name) != policy.get(name))
    name = next(names, "")
    return f"its {name} is {model.get(name)}, the policy's {policy.get(name)}" if name else ""
