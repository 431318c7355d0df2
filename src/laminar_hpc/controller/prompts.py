"""Prompts from JSONL: read and checked once at start-up, so that a bad row ends the run before it begins, naming file and row."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from laminar_hpc.config.errors import LaminarError


@dataclass(frozen=True)
class Prompt:
    text: str
    tokens: list[int]
    row: dict


def load_tokenizer(model_path: str) -> Tokenizer:
    file = Path(model_path) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise LaminarError(
            f"{file} cannot be read as a tokenizer ({error}); the model directory needs a fast tokenizer's tokenizer.json"
        ) from None


def load_prompts(path: str, field: str, tokenizer: Tokenizer, max_prompt_tokens: int, limit: int | None = None) -> list[Prompt]:
    """All rows of a JSONL file. Raises LaminarError for a row that is not UTF-8 JSON, lacks the field, is empty or is too long."""
    prompts = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if limit is not None and len(prompts) == limit:
                break
            where = f"{path}, row {number}"
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise LaminarError(f"{where}: not UTF-8 (byte {error.start}); convert the file") from None
            except json.JSONDecodeError as error:
                raise LaminarError(f"{where}: not JSON ({error.msg} at column {error.colno}); one JSON object per line is needed") from None
            if not isinstance(row, dict) or field not in row:
                keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise LaminarError(f"{where}: no field '{field}' (it has: {keys}); set data.prompt_field or mend the row")
            text = row[field]
            if not isinstance(text, str) or not text:
                raise LaminarError(f"{where}: field '{field}' must be a non-empty string, not {text!r:.60}")
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            if len(tokens) > max_prompt_tokens:
                raise LaminarError(
                    f"{where}: the prompt has {len(tokens)} tokens, at most {max_prompt_tokens} fit; shorten it or raise "
                    "trainer.tokens_per_microbatch"
                )
            prompts.append(Prompt(text, tokens, row))
    if not prompts:
        raise LaminarError(f"{path} has no rows; one JSON object per line is needed")
    return prompts


def check_token_ids(prompts: list[Prompt], vocab_size: int, path: str) -> None:
    """The tokenizer must not know more tokens than the model."""
    worst = max(max(p.tokens) for p in prompts)
    if worst >= vocab_size:
        raise LaminarError(
            f"{path}: the tokenizer gives token {worst}, the model has {vocab_size}; model.path holds a tokenizer of another model"
        )
