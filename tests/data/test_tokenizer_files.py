"""What a model's tokenizer files say is read as transformers reads it, and what can only be a mistake is
refused."""

import json

import pytest

from helpers.models.tokenizer_folders import CHATML, of_transformers, save, tokenizer_of_characters, with_bos
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import DataConfig, RunConfig
from laminar_hpc.config.source import parse_source
from laminar_hpc.data.chat_template import load_chat_template, template_text
from laminar_hpc.data.prompts import load_prompts
from laminar_hpc.data.tokens import check_rows, load_tokenizer, stop_token_ids
from laminar_hpc.environments.gateway.dialogues import Dialogues
from laminar_hpc.environments.turns.model import endless

USER = [{"role": "user", "content": "2+2?"}]
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
]


@pytest.mark.parametrize("section", ["truncation", "padding"])
def test_a_tokenizer_saved_while_it_cut_or_padded_does_neither(tmp_path, section):
    """Promise: prompts and what tools give are never cut or padded, whatever tokenizer.json says."""
    tokenizer = tokenizer_of_characters()
    if section == "truncation":
        tokenizer.enable_truncation(max_length=4)
    else:
        tokenizer.enable_padding(length=64)
    model = save(tmp_path, tokenizer)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "twelve signs"}))
    source = parse_source("data.train", str(tmp_path / "rows.jsonl"))
    found = load_prompts(source, DataConfig(), load_tokenizer(str(model)), None, 100)
    assert found.prompts[0].tokens == of_transformers(model)("twelve signs")["input_ids"]
    assert len(found.prompts[0].tokens) == 12


def test_a_plain_prompt_has_the_tokens_that_transformers_gives_it(tmp_path):
    """Promise: a post-processor's beginning of a text stands before a plain prompt; a template writes its
    own, and none is added."""
    model = save(tmp_path, with_bos(), bos_token="<s>", chat_template="{{ bos_token }}" + CHATML)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2?"}))
    source, tokenizer = parse_source("data.train", str(tmp_path / "rows.jsonl")), load_tokenizer(str(model))
    theirs = of_transformers(model)
    [plain] = load_prompts(source, DataConfig(), tokenizer, None, 100).prompts
    assert plain.tokens == theirs("2+2?")["input_ids"] and plain.tokens[0] == 1
    render = load_chat_template(str(model))
    [chat] = load_prompts(
        source, DataConfig(chat_template=True), tokenizer, lambda m, where, row: render(m, where), 100
    ).prompts
    [ids] = [theirs.apply_chat_template(USER, add_generation_prompt=True, return_dict=True)["input_ids"]]
    assert chat.tokens == ids and chat.tokens[:2] != [1, 1]


@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("written", ["list", "files"])
def test_of_several_templates_the_one_that_transformers_takes(tmp_path, written, tools):
    """Promise: `tool_use` where there are tools, else `default`, from tokenizer_config.json or from
    additional_chat_templates/."""
    tool_use = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + CHATML
    if written == "list":
        both = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": tool_use}]
        model = save(tmp_path, chat_template=both)
    else:
        model = save(tmp_path, chat_template="not this one")
        (model / "chat_template.jinja").write_text(CHATML)
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    theirs = of_transformers(model).apply_chat_template(
        USER, tools=tools or None, tokenize=False, add_generation_prompt=True
    )
    assert load_chat_template(str(model), tools)(USER, "row 1") == theirs
    assert ("add" in theirs) == bool(tools)


def test_several_templates_without_a_default_are_named(tmp_path):
    """Promise: none is guessed."""
    model = save(tmp_path, chat_template=[{"name": "rag", "template": CHATML}])
    with pytest.raises(LaminarError, match=r"has the chat templates rag and no default; save one"):
        template_text(str(model))


@pytest.mark.parametrize("listed", [True, False])
def test_special_tokens_of_the_older_file(tmp_path, listed):
    """Promise: a template's bos_token is that of transformers, which reads special_tokens_map.json where
    tokenizer_config.json does not list the tokens."""
    decoder = {"1": {"content": "<s>", "special": True}}
    settings = {"added_tokens_decoder": decoder, "bos_token": "<s>"} if listed else {"bos_token": "</s>"}
    template = "{{ bos_token + 'x' }}{{ eos_token }}{{ cls_token }}{{ image_token }}" + CHATML
    model = save(tmp_path, chat_template=template, image_token="<|im_start|>", **settings)
    map_ = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "cls_token": "<unk>"}
    (model / "special_tokens_map.json").write_text(json.dumps(map_))
    theirs = of_transformers(model).apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    assert load_chat_template(str(model))(USER, "row 1") == theirs
    assert theirs.startswith("<s>x<|im_start|>" if listed else "<s>x</s><unk>")


def test_a_variable_that_the_template_lacks_is_not_the_rows_fault(tmp_path):
    """Promise: the line names the key that gives it."""
    model = save(tmp_path, chat_template="{{ bos_token + today }}")
    with pytest.raises(LaminarError, match=r"'bos_token' is undefined.*data.chat_template_arguments"):
        load_chat_template(str(model))(USER, "row 1")


def test_arguments_of_the_template(tmp_path):
    """Promise: data.chat_template_arguments reach prompts and an agent's conversations, as transformers gives
    them to the template."""
    model, arguments = save(tmp_path, chat_template=CHATML), {"enable_thinking": False}
    theirs = of_transformers(model).apply_chat_template(
        USER, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert load_chat_template(str(model), (), arguments)(USER, "row 1") == theirs
    assert theirs.endswith("</think>\n\n") and load_chat_template(str(model))(USER, "") != theirs
    dialogue = Dialogues(model, [4], False, arguments)._make([])
    assert dialogue.conversation.written(USER) == theirs


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [(2, [4], [2, 4]), ([2], 4, [2, 4]), (2, None, [2]), (None, [4, 4], [4]), (2, "absent", [2])],
)
def test_stop_tokens_of_both_files(tmp_path, config, generation, ids):
    """Promise: config.json and generation_config.json are read as one, as SGLang does."""
    model = save(tmp_path, stop=config)
    if generation != "absent":
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert stop_token_ids(model) == ids


@pytest.mark.parametrize("ids", [[], "x", ["4"], 101, [4, -1], True, 4.0, {}])
def test_stop_tokens_that_are_none(tmp_path, ids):
    """Promise: an id that the model does not have is refused in one line with its file."""
    model = save(tmp_path, stop=None)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(LaminarError, match=r"eos_token_id") as error:
        stop_token_ids(model)
    assert "generation_config.json" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("stop", "warned"), [(2, True), ([2, 4], False)])
def test_answers_that_would_never_end(tmp_path, stop, warned):
    """Promise: one line before a run whose template ends a turn with another token than the model's stop
    tokens; it names the token and the cure."""
    config = RunConfig()
    config.model.path = str(save(tmp_path, stop=stop, chat_template=CHATML))
    config.data.chat_template = True
    lines = endless(config)
    assert len(lines) == warned
    if warned:
        assert "writes token 4 (<|im_end|>)" in lines[0] and "add 4 to eos_token_id" in lines[0]
    config.data.chat_template = False
    assert endless(config) == []


def test_tokens_without_a_row_are_refused_where_texts_come_from_elsewhere(tmp_path):
    """Promise: no text of a tool or an agent can hold a token that the model has no row for."""
    check_rows(save(tmp_path / "whole"))
    model = save(tmp_path / "more", tokenizer_of_characters(("PADTOKEN",)))
    with pytest.raises(LaminarError, match=r"has 'PADTOKEN' as token 101, the model has 101 tokens"):
        check_rows(model)
