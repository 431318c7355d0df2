"""Chat templates: the text is that of transformers, to the character; a model without one is refused in one
line."""

import json

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.data.chat_template import as_messages, load_chat_template
from laminar_hpc.machine.compat.torchvision import declare_schemas

TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
    {%- if message.role == 'system' and not loop.first %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
    {%- if message.tags is defined %}{{ message.tags | tojson(ensure_ascii=True, sort_keys=True) }}{% endif %}
    {%- generation %}{% set said = message.role %}{{ said }}{% endgeneration %}
{%- endfor %}
{%- if tools is not none or documents is not none %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{% endif %}
"""
MESSAGES = [
    {"role": "system", "content": "Répondez."},
    {"role": "user", "content": " 1 < 2 & 3? ", "tags": ["é", 1]},
    {"role": "system", "content": "left out"},
]


@pytest.fixture
def model(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return tmp_path


def test_the_text_is_that_of_transformers(model):
    """The same template gives the same text without importing transformers."""
    declare_schemas()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    render = load_chat_template(str(model))
    for messages in (MESSAGES, MESSAGES[:1], as_messages("plain text")):
        assert render(messages, "row 1") == tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "chat_template.jinja").write_text(settings.pop("chat_template"))
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_chat_template(str(model))(MESSAGES, "row 1") == render(MESSAGES, "row 1")


def test_what_cannot_be_rendered_is_one_line(model):
    """Each mistake in a template or its messages is one line with a cure."""
    with pytest.raises(
        LaminarError,
        match=r"rows.jsonl, row 3: the model's chat template refuses its messages \(no role tool\)",
    ):
        load_chat_template(str(model))([{"role": "tool", "content": "x"}], "rows.jsonl, row 3")
    (model / "chat_template.jinja").write_text("{{ 1 // (messages | length - 1) }}")
    with pytest.raises(LaminarError, match=r"row 4: the model's chat template refuses its messages .*zero"):
        load_chat_template(str(model))([{"role": "tool", "content": "x"}], "rows.jsonl, row 4")
    for text, words in (("{% if %}", "is not valid Jinja"), ("", "has no chat template")):
        (model / "chat_template.jinja").write_text(text)
        with pytest.raises(LaminarError, match=words) as error:
            load_chat_template(str(model))
        assert "\n" not in str(error.value)


def test_templates_are_sandboxed(model):
    """A template is a program from the model's folder: it cannot reach Python through the values that it is
    given."""
    (model / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(LaminarError, match="access to attribute '__class__'"):
        load_chat_template(str(model))(MESSAGES, "row 1")


def test_messages():
    """A text is a message of the user; anything but texts and messages is refused."""
    assert as_messages("hi") == [{"role": "user", "content": "hi"}]
    assert as_messages(MESSAGES) == MESSAGES
    for bad in (
        [],
        ["hi"],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        {"role": "user", "content": "hi"},
        None,
        5,
    ):
        assert as_messages(bad) is None
