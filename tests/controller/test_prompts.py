"""Bad rows end a run before it begins, in one line that names file and row."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.controller.prompts import check_token_ids, load_prompts

TOKENIZER = Tokenizer(models.WordLevel({c: i for i, c in enumerate("?0123456789+=")}, unk_token="?"))
TOKENIZER.pre_tokenizer = pre_tokenizers.Split("", "isolated")


def load(tmp_path, content: bytes, field="prompt", most=50):
    (tmp_path / "rows.jsonl").write_bytes(content)
    return load_prompts(str(tmp_path / "rows.jsonl"), field, TOKENIZER, most)


def test_rows_are_read_with_their_fields(tmp_path):
    prompts = load(tmp_path, b'{"prompt": "1+2=", "answer": "3"}\n{"prompt": "4+4=", "answer": "8"}\n')
    assert [p.text for p in prompts] == ["1+2=", "4+4="] and prompts[1].row["answer"] == "8" and prompts[0].tokens


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "1"}\n{"question": "2"}\n', r"row 2: no field 'prompt' \(it has: question\)"),
        (b'{"prompt": "1"}\n{"prompt": \n', "row 2: not JSON"),
        (b'{"prompt": "\xff"}\n', "row 1: not UTF-8"),
        (b'{"prompt": ""}\n', "row 1: field 'prompt' must be a non-empty string"),
        (b'{"prompt": 5}\n', "row 1: field 'prompt' must be a non-empty string"),
        (b'["prompt"]\n', "row 1: no field"),
        (b'{"prompt": "' + b"1" * 60 + b'"}\n', "row 1: the prompt has 60 tokens, at most 50"),
        (b"", "has no rows"),
    ],
)
def test_bad_rows(tmp_path, content, words):
    with pytest.raises(LaminarError, match=words) as error:
        load(tmp_path, content)
    assert "rows.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_a_tokenizer_of_another_model(tmp_path):
    prompts = load(tmp_path, b'{"prompt": "1+2="}\n')
    with pytest.raises(LaminarError, match="tokenizer of another model"):
        check_token_ids(prompts, 3, "rows.jsonl")
