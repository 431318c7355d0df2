"""Prompts of every format that users have; bad rows end a run before it begins, in one line that names file
and row."""

import gzip
import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import DataConfig
from laminar_hpc.config.source import Source, labels, parse_source
from laminar_hpc.data.prompts import check_token_ids, load_prompts

TOKENIZER = Tokenizer(models.WordLevel({c: i for i, c in enumerate("?0123456789+=")}, unk_token="?"))
TOKENIZER.pre_tokenizer = pre_tokenizers.Split("", "isolated")
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "1+2=", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}


def load(path, most=50, render=None, limit=None, **settings):
    source = parse_source("data.train", str(path))
    return load_prompts(source, DataConfig(**settings), TOKENIZER, render, most, limit)


def jsonl(tmp_path, content: bytes):
    (tmp_path / "rows.jsonl").write_bytes(content)
    return tmp_path / "rows.jsonl"


def parquet(tmp_path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def test_rows_are_read_with_their_fields(tmp_path):
    """Every kind of file gives the same rows."""
    found = load(jsonl(tmp_path, b'{"prompt": "1+2=", "answer": "3"}\n{"prompt": "4+4=", "answer": "8"}\n'))
    assert (
        [p.text for p in found.prompts] == ["1+2=", "4+4="]
        and found.prompts[1].row["answer"] == "8"
        and found.prompts[0].tokens
    )
    assert found.summary().endswith("rows.jsonl: 2 prompts")


def zst(content: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(content)


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("zst", zst)])
def test_compressed_rows(tmp_path, ending, pack):
    """Promise: JSONL may be packed, also in several pieces one behind the other; errors name the same rows, a
    cut file is noticed."""
    path = tmp_path / f"rows.jsonl.{ending}"
    rows = "".join(f'{{"prompt": "{i}+1="}}\n' for i in range(2000)).encode()
    path.write_bytes(pack(rows) + pack(b'{"prompt": "7+7="}\n'))
    found = load(path)
    assert len(found.prompts) == 2001 and found.prompts[-1].text == "7+7=" and found.source.label == "rows"
    path.write_bytes(pack(rows + b'{"question": "7+7="}\n'))
    with pytest.raises(LaminarError, match=rf"rows.jsonl.{ending}, row 2001: no field 'prompt'"):
        load(path)
    path.write_bytes(pack(rows)[:-500])
    with pytest.raises(
        LaminarError,
        match=rf"rows.jsonl.{ending}, row \d+: cannot be unpacked .*write or download the file again",
    ):
        load(path)
    path.write_bytes(b"plain text")
    with pytest.raises(LaminarError, match=r"row 1: cannot be unpacked"):
        load(path)


@pytest.mark.parametrize(
    "write", [parquet, lambda d, rows: jsonl(d, "\n".join(map(json.dumps, rows)).encode())]
)
def test_gsm8k_and_dapo_files_as_they_are(tmp_path, write):
    """Field names and nesting by configuration; chat messages through a template; the reward's row has the
    answer beside its own fields."""
    gsm8k = {"question": "1+1=", "answer": "one and one\n#### 2"}
    (prompt,) = load(write(tmp_path, [gsm8k]), prompt_field="question", answer_field="answer").prompts
    assert prompt.text == "1+1=" and prompt.row == gsm8k

    def render(messages, where, row):
        return "+".join(m["content"] for m in messages)

    path = write(tmp_path, [DAPO])
    (prompt,) = load(
        path, render=render, answer_field="reward_model.ground_truth", chat_template=True
    ).prompts
    assert prompt.text == "1+2=" and prompt.row == {**DAPO, "answer": "34"}
    (prompt,) = load(
        path, prompt_field="question|prompt.0.content", answer_field="answer|reward_model.ground_truth"
    ).prompts
    assert prompt.text == "1+2=" and prompt.row["answer"] == "34"
    with pytest.raises(
        LaminarError, match=r"row 1: field 'prompt' holds chat messages; set data.chat_template=true"
    ):
        load(path)


def test_a_parquet_file_of_many_batches_counts_its_rows(tmp_path):
    """A mistake is named by its row in the file, not in its batch."""
    rows = [{"prompt": "1+2="} for _ in range(3000)] + [{"prompt": None}]
    with pytest.raises(LaminarError, match=r"row 3001: field 'prompt' must be a non-empty string"):
        load(parquet(tmp_path, rows))


def test_a_hugging_face_dataset_on_disk(tmp_path):
    """Saved by `datasets`, and as a folder of files; a split and a missing one. A name that cannot be loaded
    is one line."""
    import datasets

    saved = datasets.Dataset.from_list([{"prompt": f"{i}+1="} for i in range(9)])
    datasets.DatasetDict({"train": saved, "test": saved.select([4])}).save_to_disk(str(tmp_path / "saved"))
    assert len(load(tmp_path / "saved").prompts) == 9
    found = load(f"{tmp_path}/saved@test")
    assert [p.text for p in found.prompts] == ["4+1="] and found.source.label == "saved-test"
    (tmp_path / "folder").mkdir()
    parquet(tmp_path / "folder", [{"prompt": "7+7="}])
    assert [p.text for p in load(tmp_path / "folder").prompts] == ["7+7="]
    with pytest.raises(
        LaminarError, match=r"cannot be loaded as a Hugging Face dataset, subset .none., split nope"
    ) as error:
        load(f"{tmp_path}/saved@nope")
    assert "\n" not in str(error.value)


def test_a_dataset_that_is_not_at_hand_is_one_line(tmp_path):
    """Without a network: name, reason and cure; and nothing of it, nor a Parquet file, imports torch into the
    controller."""
    path = parquet(tmp_path, [{"prompt": "1"}])
    code = f"""
import sys
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.source import parse_source
from laminar_hpc.controller import run
from laminar_hpc.data.rows import read_rows
assert not {{"datasets", "pyarrow"}} & set(sys.modules), "imported where no such file is read"
list(read_rows(parse_source("data.train", {str(path)!r})))
try:
    list(read_rows(parse_source("data.train", "laminar-hpc/no-such-dataset:main@test")))
except LaminarError as error:
    print(error)
assert "torch" not in sys.modules
"""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/bin",
        "PYTHONPATH": ":".join(sys.path),
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.strip().splitlines()
    assert (
        line.startswith("laminar-hpc/no-such-dataset cannot be loaded")
        and "subset main, split test" in line
        and "check name" in line
    )


def test_too_long_prompts_are_refused_or_dropped_and_counted(tmp_path):
    """data.too_long decides, and the line before the run says how many."""
    path = jsonl(tmp_path, b'{"prompt": "1+2="}\n{"prompt": "11111+2="}\n{"prompt": "3+4="}\n')
    with pytest.raises(
        LaminarError,
        match=r"row 2: the prompt has 8 tokens, at most 5 fit.*data.too_long=drop, or raise data.max_prompt",
    ):
        load(path, max_prompt_tokens=5)
    with pytest.raises(
        LaminarError, match=r"at most 7 fit.*lower sampling.max_response_tokens, or raise trainer.tokens_per_"
    ):
        load(path, most=7, max_prompt_tokens=20)
    found = load(path, max_prompt_tokens=5, too_long="drop")
    assert [p.text for p in found.prompts] == ["1+2=", "3+4="] and found.summary().endswith(
        "2 prompts, 1 too long and dropped"
    )
    assert [p.text for p in load(path, most=5, too_long="drop", limit=1).prompts] == ["1+2="]
    with pytest.raises(LaminarError, match=r"all 3 prompts have more than 2 tokens"):
        load(path, most=2, too_long="drop")


def test_duplicates_are_dropped_where_asked(tmp_path):
    """data.drop_duplicates compares prompt and answer."""
    rows = (
        b'{"prompt": "1+2=", "answer": 3}\n'
        b'{"prompt": "1+2=", "answer": 3, "id": 7}\n'
        b'{"prompt": "1+2=", "answer": 4}\n'
    )
    assert len(load(jsonl(tmp_path, rows)).prompts) == 3
    found = load(jsonl(tmp_path, rows), drop_duplicates=True)
    assert len(found.prompts) == 2 and found.summary().endswith("2 prompts, 1 duplicates dropped")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b'{"prompt": "1"}\n{"question": "2"}\n',
            r"row 2: no field 'prompt' \(it has: question\); set data.prompt_field",
        ),
        (b'{"prompt": "1"}\n{"prompt": \n', "row 2: not JSON"),
        (b'{"prompt": "\xff"}\n', "row 1: not UTF-8"),
        (b'{"prompt": ""}\n', "row 1: field 'prompt' must be a non-empty string"),
        (b'{"prompt": 5}\n', "row 1: field 'prompt' must be a non-empty string"),
        (
            b'{"prompt": [{"role": "user"}]}\n',
            "row 1: field 'prompt' must be a non-empty string or a list of chat messages",
        ),
        (b'["prompt"]\n', "row 1: a list, not an object"),
        (b"[" * 100_000 + b"\n", "row 1: not JSON"),
        (b'{"prompt": "1"}\n\n', "row 2: an empty line; take it out"),
        (b'{"prompt": "' + b"1" * 60 + b'"}\n', "row 1: the prompt has 60 tokens, at most 50"),
        (
            b'{"prompt": "1", "id": 123456789012345678901234567890}\n',
            "row 1: a value cannot be sent to a rollout",
        ),
        (b'{"prompt": "1\\ud800"}\n', "row 1: a value cannot be sent to a rollout"),
        (b'{"prompt": "1", "n": ' + b"7" * 5000 + b"}\n", "row 1: not JSON .a number has too many digits"),
        (b"", "has no rows"),
    ],
)
def test_bad_rows(tmp_path, content, words):
    """A bad row is one line with file, row and cure."""
    with pytest.raises(LaminarError, match=words) as error:
        load(jsonl(tmp_path, content))
    assert "rows.jsonl" in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400


def test_files_as_windows_writes_them(tmp_path):
    """A byte order mark and carriage returns do no harm."""
    found = load(jsonl(tmp_path, b'\xef\xbb\xbf{"prompt": "1"}\r\n{"prompt": "2"}\r\n'))
    assert [prompt.text for prompt in found.prompts] == ["1", "2"]


@pytest.mark.parametrize("value", [None, "", True, ["7"]])
def test_bad_answers(tmp_path, value):
    """An answer must be a text or a number."""
    path = jsonl(tmp_path, json.dumps({"prompt": "1", "a": {"b": value}}).encode())
    with pytest.raises(LaminarError, match=r"row 1: field 'a.b' must be a text or a number"):
        load(path, answer_field="a.b")
    with pytest.raises(LaminarError, match=r"row 1: no field 'a.c'.*set data.answer_field"):
        load(path, answer_field="a.c")


def test_broken_parquet(tmp_path):
    """No Parquet at all, and one whose pages are overwritten: the row that cannot be read is named."""
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 or so")
    with pytest.raises(
        LaminarError,
        match=r"rows.parquet, row 1: cannot be read as Parquet .*write or download the file again",
    ):
        load(tmp_path / "rows.parquet")
    import pyarrow.parquet

    far = pyarrow.array([2**40], pyarrow.timestamp("s"))  # behind Python's last year
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1"], "at": far}), tmp_path / "rows.parquet")
    with pytest.raises(LaminarError, match=r"rows.parquet, row 1: cannot be read as Parquet"):
        load(tmp_path / "rows.parquet")
    path = parquet(tmp_path, [{"prompt": f"{i}+{i}="} for i in range(2000)])
    content = bytearray(path.read_bytes())
    content[100:2000] = b"\x99" * 1900
    path.write_bytes(bytes(content))
    with pytest.raises(LaminarError, match=r"rows.parquet, row \d+: ") as error:
        load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "nowhere.parquet", "/nowhere/at/all", "", "gsm8k"])
def test_missing_files(name):
    """A file that is not there is one line that names its key."""
    with pytest.raises(LaminarError, match="no such file") as error:
        parse_source("data.train", name)
    assert str(error.value).startswith("data.train=")


def test_names_of_sources():
    """The labels of evaluation files are short and differ."""
    source = parse_source("data.train", "openai/gsm8k:main@test")
    assert (source.kind, source.path, source.subset, source.split) == ("hub", "openai/gsm8k", "main", "test")
    assert source.label == "gsm8k-main-test"
    files = [Source("parquet", "/data/math/test.parquet"), Source("jsonl", "/data/gsm8k/test.jsonl"), source]
    assert labels("evaluation.files", files) == ["math-test", "gsm8k-test", "gsm8k-main-test"]
    with pytest.raises(LaminarError, match="two of them are called 'gsm8k-test'"):
        labels("evaluation.files", [*files, files[1]])
    assert parse_source("data.train", "openai/gsm8k").split == "train"


def test_a_tokenizer_of_another_model(tmp_path):
    """A token beyond the vocabulary is refused before the run."""
    found = load(jsonl(tmp_path, b'{"prompt": "1+2="}\n'))
    with pytest.raises(LaminarError, match="tokenizer of another model"):
        check_token_ids(found, 3)
