"""Models for tests of several turns: a tokenizer of characters with marks of roles, and chat templates of the
kinds that there are. No weights."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MARKS = ["<pad>", "<eos>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]

_TOOLS = "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}\n{% endfor %}CLOSE{% endif %}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>"
    "{% endfor %}"
)
_BODY = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}" + _CALLS + "CLOSE{% endfor %}"
_NEXT = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"

# a turn ends with a token of its own, and a line break that the model never draws stands behind it
SEPARATED = (_TOOLS + _BODY + _NEXT).replace("CLOSE", "<|end|>\n")
# the next role's mark ends a turn
ROLE_MARKED = (_TOOLS + _BODY + _NEXT).replace("CLOSE", "").replace("|>\n", "|>")
# what was thought is left out of earlier turns
FORGETFUL = SEPARATED.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
# results of earlier turns are left out
CLEARED = SEPARATED.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'tool' else '' }}")
# tools and their calls are not written
WITHOUT_TOOLS = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}" + _NEXT


def save(folder: Path, template: str, stop: list[str]) -> Path:
    """A folder with tokenizer, template and stop tokens, as a model has them."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(i) for i in range(32, 127)] + ["\n", "é"]
    vocabulary = {text: i for i, text in enumerate([*MARKS, *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    ids = [vocabulary[text] for text in stop]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


def vocabulary_size() -> int:
    return len(MARKS) + 95 + 2
