"""Text of token ids, and the ids that end a response, from the files of a Hugging Face directory. Needs the
`tokenizers` library only."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from laminar_hpc.config.errors import LaminarError


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def model_config(model: Path) -> dict[str, Any]:
    """config.json of the model. Raises LaminarError when it is not there."""
    if not (model / "config.json").exists():
        raise LaminarError(f"model.path={model} holds no config.json: give a Hugging Face directory")
    return _read_json(model / "config.json")


def stop_token_ids(model: Path) -> list[int]:
    """The end-of-sequence ids of generation_config.json, else those of config.json."""
    for file in ("generation_config.json", "config.json"):
        ids = _read_json(model / file).get("eos_token_id")
        if ids is not None:
            return sorted({ids} if isinstance(ids, int) else set(ids))
    raise LaminarError(
        f"model.path={model} names no eos_token_id in generation_config.json "
        "or config.json, so no response would ever end"
    )


def load_tokenizer(model_path: str) -> Tokenizer:
    """The model's fast tokenizer. Raises LaminarError where tokenizer.json cannot be read."""
    file = Path(model_path) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise LaminarError(
            f"{file} cannot be read as a tokenizer ({error}); "
            "the model directory needs a fast tokenizer's tokenizer.json"
        ) from None


class TextDecoder:
    """Text by the tokenizer.json of a model. Raises LaminarError when there is none."""

    def __init__(self, model: Path) -> None:
        path = model / "tokenizer.json"
        if not path.exists():
            raise LaminarError(
                f"model.path={model} holds no tokenizer.json: save the tokenizer there in its fast form"
            )
        self._tokenizer = Tokenizer.from_file(str(path))

    def text(self, token_ids: list[int], specials: bool = False) -> str:
        """The text, by default without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=not specials))
