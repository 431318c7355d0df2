"""Data files that no run can begin with."""

import contextlib
import gzip
import io
import time

import pytest

from helpers.refusals import refusal
from laminar_hpc.launch import cli


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", b"[\n", "row 1: not JSON"),
        (
            "a.jsonl",
            b'{"prompt": "1"}\n{"question": "2"}\n',
            "row 2: no field 'prompt' (it has: question); set data.prompt_field",
        ),
        ("a.jsonl.gz", b"not gzip", "row 1: cannot be unpacked"),
        ("a.jsonl.gz", gzip.compress(b'{"question": "2"}\n', mtime=0), "row 1: no field 'prompt'"),
        ("a.parquet", b"PAR1", "cannot be read as Parquet"),
    ],
)
@pytest.mark.parametrize("key", ["data.train={}", "evaluation.files=[{}]"])
def test_bad_data_files_are_refused_before_anything_starts(tmp_path, key, name, content, text):
    """Promise: a file that cannot be read, is empty, or lacks the field in its first rows never starts a
    run."""
    (tmp_path / name).write_bytes(content)
    (line,) = refusal("train", "experiment=demo", key.format(tmp_path / name), f"run_dir={tmp_path}/run")
    assert text in line and str(tmp_path / name) in line and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "no such file"),
        ('{"prompt": "1+1=", "answer": "2"}\n', "row 1: no field 'response' (it has: prompt, answer); set"),
        ('{"prompt": "1+1=", "response": 2}\n', "row 1: field 'response' must be a text; mend the row"),
    ],
)
def test_demonstrations_are_looked_at_before_anything_starts(tmp_path, capsys, content, text):
    """Promise: a mistake in their file starts nothing, moves no earlier run aside, and a dry run says it."""
    file, run = tmp_path / "shown.jsonl", tmp_path / "run"
    if content is not None:
        file.write_text(content)
    words = ["train", "experiment=demo", f"demonstrations.path={file}", f"run_dir={run}"]
    (line,) = refusal(*words)
    assert text in line and str(file) in line and not run.exists()
    assert cli.run([*words, "dry_run=true"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if text in line]
    assert line.startswith("before a run")


@pytest.mark.parametrize("key", ["teacher.model", "critic.path"])
def test_a_dry_run_misses_models_beside_the_policy(tmp_path, capsys, key):
    """Promise: the directory of a teacher or a critic that is not there is among what a run would need."""
    words = ["algorithm.advantage=gae"] if key == "critic.path" else []
    assert cli.run(["train", "experiment=demo", f"{key}={tmp_path}/none", *words, "dry_run=true"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("before a run")]
    assert f"{key}={tmp_path}/none: there is no config.json; name a" in line


def test_a_large_file_is_looked_at_quickly(tmp_path):
    """Promise: only the beginning of a file is read before a run: a row far behind it does not count, nor
    does the size."""
    with open(tmp_path / "big.jsonl", "w") as file:
        file.write('{"prompt": "1"}\n' * 20)
        file.truncate(8 << 30)  # zeros, which take no room
    started = time.thread_time()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.run(["train", "experiment=demo", f"data.train={tmp_path}/big.jsonl", "dry_run=true"]) == 0
    assert time.thread_time() - started < 2 and "before a run" not in out.getvalue()
