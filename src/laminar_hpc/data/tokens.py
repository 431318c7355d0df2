"""Text of token ids, and the ids that end a response, from the files of a Hugging Face directory. Needs the
`tokenizers` library only."""

import json
import math
from pathlib import Path

from tokenizers import Tokenizer

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import read_json


def _rows(model: Path) -> float:
    """Tokens that the model has; without a config.json that is left to others."""
    return read_json(model / "config.json").get("vocab_size") or math.inf


def stop_token_ids(model: Path) -> list[int]:
    """The end-of-sequence ids of config.json and generation_config.json together, as SGLang has them. Raises
    LaminarError where there are none, or ids that the model does not have."""
    found, rows = set[int](), _rows(model)
    for file in ("generation_config.json", "config.json"):
        ids = read_json(model / file).get("eos_token_id")
        for each in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < rows:
                raise LaminarError(
                    f"{model / file}: eos_token_id={json.dumps(ids)} is not the id of a token that the model "
                    f"has, which are those below {rows}; write the id of its end token"
                )
            found.add(each)
    if not found:
        raise LaminarError(
            f"model.path={model} names no eos_token_id in generation_config.json "
            "or config.json, so no response would ever end"
        )
    return sorted(found)


def load_tokenizer(model_path: str) -> Tokenizer:
    """The model's fast tokenizer; it neither cuts nor pads, whatever its file says of the texts that it was
    made for. Raises LaminarError where tokenizer.json cannot be read."""
    file = Path(model_path) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise LaminarError(
            f"{file} cannot be read as a tokenizer ({error}); "
            "the model directory needs a fast tokenizer's tokenizer.json"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_rows(model: Path) -> None:
    """Raises LaminarError for a tokenizer with ids beyond the model's rows, which some text could hold."""
    rows = _rows(model)
    beyond = {id_: text for text, id_ in load_tokenizer(str(model)).get_vocab().items() if id_ >= rows}
    if beyond:
        first = min(beyond)
        raise LaminarError(
            f"{model}/tokenizer.json has {beyond[first]!r} as token {first}, the model has {rows} tokens, "
            "and texts of tools and agents may hold it: take it out of the tokenizer's files, or give the "
            "model a row for it (resize_token_embeddings of transformers)"
        )


class TextDecoder:
    """Text by the tokenizer.json of a model. Raises LaminarError when there is none."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = load_tokenizer(str(model))

    def text(self, token_ids: list[int], specials: bool = False) -> str:
        """The text, by default without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=not specials))
