"""Model folders with a small tokenizer, as transformers reads them; no weights."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from laminar_hpc.machine.compat.torchvision import declare_schemas

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def tokenizer_of_characters(more: tuple[str, ...] = ()) -> Tokenizer:
    """Special tokens, then printable characters, then `more` added tokens."""
    letters = [chr(i) for i in range(32, 127)] + ["\n"]
    found = Tokenizer(models.WordLevel({c: i for i, c in enumerate([*SPECIAL, *letters])}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found.decoder = decoders.Fuse()
    found.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    found.add_tokens(list(more))
    return found


def save(folder: Path, tokenizer: Tokenizer | None = None, stop: object = 4, **settings: object) -> Path:
    """A model's folder; `settings` of its tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or tokenizer_of_characters()).save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 101, "eos_token_id": stop}))
    return folder


def with_bos() -> Tokenizer:
    """Its post-processor writes <s> in front, as Llama's does."""
    found = tokenizer_of_characters()
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return found


def of_transformers(folder: Path):
    """The reference."""
    declare_schemas()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
