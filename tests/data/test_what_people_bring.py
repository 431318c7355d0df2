"""Folders, messages and values as users have them: taken whole, or refused with the row; never silently
something else."""

import json

import pytest

from helpers.models.tokenizer_folders import CHATML, of_transformers, save
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import DataConfig
from laminar_hpc.config.source import parse_source
from laminar_hpc.data.chat_template import as_messages, continued, load_chat_template
from laminar_hpc.data.prompts import load_prompts
from laminar_hpc.data.tokens import load_tokenizer
from laminar_hpc.environments.gateway.chat import parse


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "model", chat_template=CHATML)


def load(model, path, **settings):
    """With the chat template where it is asked for, as a run does."""
    render = load_chat_template(str(model))
    data = DataConfig(**settings)
    of_row = (lambda m, where, row: render(m, where, continued(m))) if data.chat_template else None
    return load_prompts(parse_source("data.train", str(path)), data, load_tokenizer(str(model)), of_row, 500)


def jsonl(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path, *rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def numbered(first, last):
    return [{"prompt": str(i)} for i in range(first, last)]


# ---- folders -----------------------------------------------------------------------------------------------


def test_a_folder_is_all_of_its_files(model, tmp_path):
    """Promise: rows of every file of the split, in order of their names, and the line says which files these
    are; held-out files are not trained on."""
    jsonl(tmp_path / "rows/train.jsonl", *numbered(0, 3))
    jsonl(tmp_path / "rows/more.jsonl", *numbered(3, 7))
    jsonl(tmp_path / "rows/test.jsonl", *numbered(7, 9))
    jsonl(tmp_path / "rows/extra/part.jsonl", *numbered(9, 10))
    jsonl(tmp_path / "rows/validation/part.jsonl", *numbered(10, 11))
    (tmp_path / "rows/dataset_info.json").write_text("{}")
    found = load(model, tmp_path / "rows")
    assert sorted(int(p.text) for p in found.prompts) == [0, 1, 2, 3, 4, 5, 6, 9]
    assert found.summary().endswith("8 prompts of extra/part.jsonl, more.jsonl, train.jsonl")
    for split, texts in (("test", ["7", "8"]), ("validation", ["10"])):
        assert [p.text for p in load(model, f"{tmp_path}/rows@{split}").prompts] == texts
    with pytest.raises(LaminarError, match=r"has no file of split nope \(it has: .*more.jsonl"):
        load(model, f"{tmp_path}/rows@nope")


def test_a_row_of_a_folder_is_that_of_its_file(model, tmp_path):
    """Promise: texts that look like dates, numbers and nulls are the same in a folder as in its file, and so
    is the place that an error names."""
    rows = [{"prompt": "1", "answer": "2024-05-01", "n": None}, {"prompt": "2", "answer": "007", "x": [1]}]
    file = jsonl(tmp_path / "rows/a.jsonl", *rows)
    alone, within = load(model, file), load(model, tmp_path / "rows")
    assert [p.row for p in within.prompts] == [p.row for p in alone.prompts] == rows
    jsonl(tmp_path / "rows/b.jsonl", {"prompt": "3", "answer": "4"}, {"prompt": ""})
    with pytest.raises(LaminarError, match=r"rows/b.jsonl, row 2: field 'prompt'"):
        load(model, tmp_path / "rows")


def test_files_of_a_folder_may_differ(model, tmp_path):
    """Promise: other columns, JSONL beside Parquet, and an array of JSON are read together; what lacks the
    field is named with its file."""
    jsonl(tmp_path / "rows/a.jsonl", {"question": "1", "level": 3})
    parquet(tmp_path / "rows/b.parquet", {"prompt": "2", "level": "hard"})
    (tmp_path / "rows/c.json").write_text(json.dumps([{"prompt": "3"}, {"prompt": "4"}], indent=2))
    found = load(model, tmp_path / "rows", prompt_field="prompt|question")
    assert [p.text for p in found.prompts] == ["1", "2", "3", "4"]
    with pytest.raises(LaminarError, match=r"a.jsonl, row 1: no field 'prompt' \(it has: question, level\)"):
        load(model, tmp_path / "rows")


def test_a_subset_of_a_folder_is_read_without_guesses(model, tmp_path):
    """Promise: what the library `datasets` finds by its README is read as the files are."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: a.jsonl\n---\n"
    )
    jsonl(tmp_path / "rows/a.jsonl", {"prompt": "1", "answer": "2024-05-01"})
    jsonl(tmp_path / "rows/b.jsonl", {"prompt": "2"})
    [prompt] = load(model, f"{tmp_path}/rows:main").prompts
    assert prompt.row == {"prompt": "1", "answer": "2024-05-01"}
    with pytest.raises(LaminarError, match=r"check subset, split and the files") as error:
        load(model, f"{tmp_path}/rows:nope")
    assert "network" not in str(error.value)


def test_columns_that_the_library_cannot_join_are_named(model, tmp_path):
    """Promise: where only the library reads a folder, its line says what differs."""
    for name, header in (("a", "prompt"), ("b", "question")):
        (tmp_path / "rows").mkdir(exist_ok=True)
        (tmp_path / f"rows/{name}.csv").write_text(f"{header}\n1\n")
    with pytest.raises(
        LaminarError, match=r"prompt: int64 vs question: int64.*check subset, split and"
    ) as error:
        load(model, tmp_path / "rows")
    assert "\n" not in str(error.value)


# ---- messages ----------------------------------------------------------------------------------------------

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
SAME_AS_AN_AGENT_SENDS = [
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}],
    [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"},
    ],
]


@pytest.mark.parametrize("messages", SAME_AS_AN_AGENT_SENDS)
def test_messages_of_rows_are_those_of_requests(messages):
    """Promise: what the listener takes of an agent is taken of a row, and means the same."""
    request = json.dumps({"model": "policy", "messages": messages}).encode()
    assert as_messages(json.loads(json.dumps(messages))) == parse(request).messages


def test_keys_that_parquet_fills_with_null_are_not_there(model, tmp_path):
    """Promise: a message is the same from Parquet as from JSONL; the row that rewards get is not changed."""
    mixed = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "r"},
        {"role": "user", "content": "v", "name": "n"},
    ]
    path = parquet(tmp_path / "rows.parquet", {"prompt": mixed})
    [prompt] = load(model, path, chat_template=True).prompts
    seen = as_messages(prompt.row["prompt"])
    assert "tool_calls" not in seen[0] and seen[0] == {"role": "user", "content": "u"}
    assert seen[1]["content"] == "" and prompt.row["prompt"][0]["tool_calls"] is None
    assert seen == as_messages(mixed)


def test_sharegpt(model, tmp_path):
    """Promise: {from, value} are messages, with the roles that chat templates have."""
    row = {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "2+2?"}]}
    path = jsonl(tmp_path / "rows.jsonl", row)
    [prompt] = load(model, path, chat_template=True, prompt_field="conversations").prompts
    assert prompt.text.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n2+2?")


@pytest.mark.parametrize(
    "value", [[{"role": "user"}], [{"role": "user", "content": [{"type": "image"}]}], [{}]]
)
def test_what_is_no_message_is_refused_without_contradiction(model, tmp_path, value):
    """Promise: the line says what a message needs."""
    with pytest.raises(LaminarError, match=r"row 1: .*each with a role and a content that is text, not"):
        load(model, jsonl(tmp_path / "rows.jsonl", {"prompt": value}), chat_template=True)


def test_the_first_field_that_is_not_null(model, tmp_path):
    """Promise: of `a|b` a row's null is passed over; where all are null the row is refused."""
    path = parquet(
        tmp_path / "rows.parquet", {"question": None, "prompt": "1"}, {"question": "2", "prompt": None}
    )
    found = load(model, path, prompt_field="question|prompt")
    assert [p.text for p in found.prompts] == ["1", "2"]
    with pytest.raises(LaminarError, match=r"row 1: field 'question\|a' must be"):
        load(model, jsonl(tmp_path / "rows.jsonl", {"question": None, "a": None}), prompt_field="question|a")


def test_a_prompt_that_ends_with_the_assistants_words(model, tmp_path):
    """Promise: refused with the row, as it may be the solution; with continue_final_message the response
    goes on from it, as transformers writes it."""
    for begun in ("<think>", "So: ", " x  "):
        messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": begun}]
        path = jsonl(tmp_path / "rows.jsonl", {"prompt": messages})
        with pytest.raises(
            LaminarError, match=r"row 1: the last message .* data.chat_template_arguments.continue_final_mess"
        ):
            load(model, path, chat_template=True)
        goes_on = {"continue_final_message": True}
        [prompt] = load(model, path, chat_template=True, chat_template_arguments=goes_on).prompts
        theirs = of_transformers(model)
        assert prompt.text == theirs.apply_chat_template(
            messages, tokenize=False, continue_final_message=True
        )
        theirs.chat_template = trimming = CHATML.replace("m.content", "m.content | trim")
        text = load_chat_template(str(save(tmp_path / "trims", chat_template=trimming)))(messages, "", True)
        assert text == theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)


def test_a_system_prompt(model, tmp_path):
    """Promise: it stands before every prompt that has no system message of its own; those keep theirs."""
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]
    path = jsonl(tmp_path / "rows.jsonl", {"prompt": "a"}, {"prompt": own})
    first, second = load(model, path, chat_template=True, system_prompt="Be brief.").prompts
    theirs = of_transformers(model)
    with_it = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    for prompt, messages in ((first, with_it), (second, own)):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert prompt.text == text


# ---- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), [1, {"x": float("nan")}]])
@pytest.mark.parametrize("write", [jsonl, parquet])
def test_numbers_that_nothing_equals(model, tmp_path, write, value):
    """Promise: NaN and infinities are refused with row and field, wherever they stand."""
    if write is parquet and isinstance(value, list):
        value = [value[1]]
    path = write(
        tmp_path / f"rows.{write.__name__}", {"prompt": "1", "answer": "1"}, {"prompt": "1", "z": value}
    )
    if write is parquet:
        path = parquet(path, {"prompt": "1", "z": value})
    with pytest.raises(LaminarError, match=r"row \d: field 'z' holds NaN or an infinity"):
        load(model, path)


@pytest.mark.parametrize("value", ["NaN", "Infinity", '" "', '"\\n\\t"'])
def test_answers_that_no_response_can_give(model, tmp_path, value):
    """Promise: refused with the row, not graded 0 for ever."""
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "1", "answer": {value}}}\n')
    with pytest.raises(LaminarError, match=r"row 1: field 'answer' (must be|holds)"):
        load(model, tmp_path / "rows.jsonl", answer_field="answer")


def test_all_kinds_of_mistakes_of_a_file(model, tmp_path):
    """Promise: a line for each kind, with the first row of its kind, up to where the file can be read."""
    rows = [{"prompt": "1"}, {"question": "2", "answer": ""}, {"question": "3", "answer": 4}, {"prompt": 5}]
    path = jsonl(tmp_path / "rows.jsonl", *rows)
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(LaminarError) as error:
        load(model, path, answer_field="answer")
    places = [line.partition(":")[0] for line in str(error.value).splitlines()]
    assert places == [f"{path}, row {number}" for number in (1, 2, 2, 4, 5)]
