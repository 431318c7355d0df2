"""Prompts from rows, rendered and checked once at start-up, so that a bad row ends the run before it begins,
naming file and row."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.schema import DataConfig, RunConfig
from laminar_hpc.config.source import Source, parse_source
from laminar_hpc.data.chat_template import Messages, as_messages, continued
from laminar_hpc.data.rows import field as field_of
from laminar_hpc.data.rows import files_of, read_rows

_FIRST_ROWS = 8  # of a file, looked at before anything starts
_MISTAKES = 8  # of a file that are said
_NAMED = 3  # files of a folder that are named
_MORE_ROOM = (
    "lower sampling.max_response_tokens, or raise trainer.tokens_per_microbatch (within the model's "
    "positions)"
)
RowRender = Callable[[Messages, str, dict], str]  # (messages, place of the row, the row) -> text


@dataclass(frozen=True)
class Prompt:
    """`text` is what the model sees, `row` what the reward gets; `where` names the file and the row."""

    text: str
    tokens: list[int]
    row: dict
    where: str = ""


@dataclass
class PromptSet:
    """The prompts of one source, and how many of its rows were left out."""

    source: Source
    prompts: list[Prompt] = field(default_factory=list)
    too_long: int = 0
    duplicates: int = 0

    def summary(self) -> str:
        """For the line that is said before the run."""
        parts = [f"{self.source.path}: {len(self.prompts):,} prompts"]
        if self.source.kind == "folder" and (files := files_of(self.source)):
            names = ", ".join(str(Path(file).relative_to(self.source.path)) for file in files[:_NAMED])
            more = f" and {len(files) - _NAMED:,} more" if len(files) > _NAMED else ""
            parts[0] += f" of {names}{more}"
        parts += [f"{self.too_long:,} too long and dropped"] if self.too_long else []
        parts += [f"{self.duplicates:,} duplicates dropped"] if self.duplicates else []
        return ", ".join(parts)


def load_prompts(
    source: Source,
    data: DataConfig,
    tokenizer: Tokenizer,
    render: RowRender | None,
    room: int,
    limit: int | None = None,
    kept: int | None = None,
) -> PromptSet:
    """All rows of a source, or its first `limit` prompts; at most `room` tokens fit into the model beside a
    response.

    `render` applies the chat template; None takes prompts as they are. `kept`: tokens of a prompt that are
    kept; an agent writes the rest. Raises LaminarError for a row that cannot be used.
    """
    result, seen = PromptSet(source), set()
    tokens_max = min(room, data.max_prompt_tokens or room)

    def take(where: str, row: dict) -> bool:
        """Whether more rows are wanted."""
        text, row = _prompt(row, data, render, where, own=kept is not None)
        if data.drop_duplicates:
            mark = hash((text, json.dumps(row.get("answer"), default=str)))
            if mark in seen:
                result.duplicates += 1
                return True
            seen.add(mark)
        # as transformers: a chat template writes its special tokens itself
        tokens = tokenizer.encode(text, add_special_tokens=render is None).ids[:kept]
        if not tokens:
            raise LaminarError(f"{where}: the tokenizer makes no token of its prompt; mend the row")
        if len(tokens) <= tokens_max:
            result.prompts.append(Prompt(text, tokens, row, where))
        elif data.too_long == "refuse":
            cure = "or raise data.max_prompt_tokens" if tokens_max < room else _MORE_ROOM
            text = f"{where}: the prompt has {len(tokens)} tokens, at most {tokens_max} fit"
            raise LaminarError(f"{text}; shorten it, set data.too_long=drop, {cure}")
        else:
            result.too_long += 1
        return len(result.prompts) != limit

    if wrong := mistakes(source, take):
        raise Refused(wrong)
    if not result.prompts and result.too_long:
        text = f"all {result.too_long} prompts have more than {tokens_max} tokens; raise what bounds them"
        raise LaminarError(f"{source.path}: {text}")
    if not result.prompts:
        raise LaminarError(f"{source.path} has no rows; one row per prompt is needed")
    return result


def mistakes(source: Source, take: Callable[[str, dict], bool], rows: int | None = None) -> list[str]:
    """What is wrong with the rows of a source, or its first `rows`: a line for each kind of mistake, the
    first of its kind. `take(where, row)` says whether to go on."""
    lines: dict[str, str] = {}
    try:
        for where, row in islice(read_rows(source), rows):
            try:
                if not take(where, row):
                    break
            except LaminarError as error:
                for line in str(error).splitlines():
                    lines.setdefault(line.removeprefix(where), line)
            if len(lines) >= _MISTAKES:
                break
    except LaminarError as error:  # it cannot be read further
        lines[""] = str(error)
    return list(lines.values())


def wrong_first_rows(config: RunConfig) -> list[str]:
    """What is wrong with the first rows of the configuration's files, or with a file itself, one line each.

    In well under a second, whatever a file's size. Files that are not there are left to `config.check`,
    datasets to the controller."""
    lines: list[str] = []
    names = [("demonstrations.path", path)] if (path := config.demonstrations.path) else []
    if not config.source.startswith("replay:"):
        names += [] if config.brings_rows else [("data.train", config.data.train)]
        names += [("evaluation.files", name) for name in config.evaluation.files]
    for key, name in names:
        try:
            source = parse_source(key, name)
        except LaminarError:
            continue
        try:
            for file in files_of(source) or ():
                lines += _wrong_first_rows(key, Source(source.kind, file), config)
        except LaminarError as error:
            lines.append(str(error))
    return lines


def demonstrated(row: dict, name: str, where: str) -> str:
    """The answer of a demonstration, in the field `name`. Raises LaminarError where there is none."""
    answer = field_of(row, name, where, "demonstrations.response_field")
    if not isinstance(answer, str) or not answer.strip():
        raise LaminarError(f"{where}: field '{name}' must be a text; mend the row")
    return answer


def _wrong_first_rows(key: str, file: Source, config: RunConfig) -> list[str]:
    seen, render = 0, (lambda messages, where, row: "") if config.data.chat_template else None
    shown = key == "demonstrations.path"
    data = replace(config.data, answer_field="") if shown else config.data

    def look(where: str, row: dict) -> bool:
        nonlocal seen
        seen += 1
        _prompt(row, data, render, where, own=config.environment.by_url and not shown)
        if shown:
            demonstrated(row, config.demonstrations.response_field, where)
        return True

    source = Source("parquet" if file.path.endswith(".parquet") else "jsonl", file.path)
    lines = mistakes(source, look, _FIRST_ROWS)
    return lines if lines or seen else [f"{file.path} has no rows; one row per prompt is needed"]


def _prompt(row: dict, data: DataConfig, render: RowRender | None, where: str, own: bool) -> tuple[str, dict]:
    """What the model shall see, and what the reward gets. `own`: whoever gets the row writes the messages.
    Raises LaminarError with a line for each of the two that is wrong."""
    lines, text = [], ""
    try:
        value = field_of(row, data.prompt_field, where, "data.prompt_field")
        text = _text(value, row, render, data, where, own)
    except LaminarError as error:
        lines.append(str(error))
    if data.answer_field:
        try:
            row = {**row, "answer": _answer(row, data.answer_field, where)}
        except LaminarError as error:
            lines.append(str(error))
    if lines:
        raise Refused(lines)
    _check_sendable(text, row, where)
    return text, row


def _text(value: object, row: dict, render: RowRender | None, data: DataConfig, where: str, own: bool) -> str:
    """Raises LaminarError when the row's prompt is neither a text nor messages for a template."""
    name, messages = data.prompt_field, as_messages(value) if value else None
    if messages is None:
        raise LaminarError(
            f"{where}: field '{name}' must be a non-empty string or a list of chat messages, each with a "
            f"role and a content that is text, not {value!r:.60}"
        )
    if render is not None:
        goes_on = data.chat_template_arguments.get("continue_final_message", own)
        if continued(messages) and not goes_on:
            raise LaminarError(
                f"{where}: the last message of field '{name}' is the assistant's; leave it out if it is a "
                "solution, or set data.chat_template_arguments.continue_final_message=true if the response "
                "goes on from it"
            )
        if data.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": data.system_prompt}, *messages]
        return render(messages, where, row)
    if not isinstance(value, str):
        raise LaminarError(
            f"{where}: field '{name}' holds chat messages; "
            "set data.chat_template=true, or name a field with plain text"
        )
    return value


def _answer(row: dict, names: str, where: str) -> str | int | float:
    value = field_of(row, names, where, "data.answer_field")
    blank = isinstance(value, str) and not value.strip()
    if isinstance(value, bool) or not isinstance(value, str | int | float) or blank:
        raise LaminarError(
            f"{where}: field '{names}' must be a text or a number, "
            f"not {value!r:.60}; mend the row or set data.answer_field"
        )
    return value


def _check_sendable(text: str, row: dict, where: str) -> None:
    """Prompt and row cross between processes; what cannot is refused before the run, and so are numbers that
    no answer can be compared with."""
    for name, value in row.items():
        try:
            json.dumps(value, allow_nan=False, default=str, skipkeys=True)
        except (ValueError, RecursionError):
            raise LaminarError(
                f"{where}: field '{name}' holds NaN or an infinity, or is nested too deeply; mend the row or "
                "drop the field"
            ) from None
    try:
        msgspec.msgpack.encode([text, row])
    except (TypeError, ValueError, OverflowError) as error:  # ValueError: also half of a surrogate pair
        raise LaminarError(
            f"{where}: a value cannot be sent to a rollout "
            f"({str(error)[:120]}); mend the row or drop the field"
        ) from None


def check_token_ids(prompts: PromptSet, vocab_size: int) -> None:
    """The tokenizer must not know more tokens than the model."""
    largest = max(max(p.tokens) for p in prompts.prompts)
    if largest >= vocab_size:
        raise LaminarError(
            f"{prompts.source.path}: the tokenizer gives token {largest}, "
            f"the model has {vocab_size}; model.path holds a tokenizer of another model"
        )
