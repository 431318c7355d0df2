"""The archive: what has been trained leaves the payload files, exactly and small, and comes back when it has
to."""

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.made import Made
from laminar_hpc.line.messages.data import VersionSpan
from laminar_hpc.policies.retention import kept
from laminar_hpc.store.archive import files, table
from laminar_hpc.store.payload.layout import DamagedResponse, pack, packed_digest

BYTES_PER_TOKEN_MAX = 4.2


def made(trajectory_id: int, tokens: int, seed: int = 0, **fields: object) -> Made:
    """Tokens by their ranks, a few of them often, as in text; log-probs as a softmax in float32 gives them:
    most tokens are nearly certain."""
    draw = np.random.default_rng((seed, trajectory_id))
    ids = np.minimum(draw.zipf(1.3, tokens), 150_000)
    margins = draw.normal(9.0, 6.0, tokens).astype(np.float32)
    logprobs = -np.log(np.float32(1) + np.exp(-margins))
    group = trajectory_id // 4
    prompt = np.random.default_rng(group).integers(0, 150_000, 40).tolist()
    return Made(trajectory_id, group, prompt, ids.tolist(), logprobs.tolist(), **fields)


def test_rows_are_the_responses(tmp_path):
    """Promise: every column and the digest come back bit by bit; several policies, masked tokens and an empty
    response too; pandas and datasets read the file as it is."""
    spans = [VersionSpan(3, 0, 2), VersionSpan(4, 2, 5)]
    odd = made(1, 5, version_spans=spans, loss_mask=[0, 1, 1, 0, 1], reward_parts={"accuracy": 0.5})
    wholes = [m.whole for m in (made(0, 300, reward=0.25, attempt=2), odd, made(2, 0), made(5, 7))]
    size = files.write(tmp_path, 7, [wholes[:2], wholes[2:]])
    path = files.path_of(tmp_path, 7)
    assert path.name == "step_000007.parquet" and path.stat().st_size == size.bytes
    back = list(table.read(path))
    assert [b.record for b in back] == [w.record for w in wholes]
    for b, w in zip(back, wholes, strict=True):
        assert pack(b.response) == pack(w.response) and packed_digest(pack(b.response)) == w.record.digest
        assert b.prompt.tolist() == w.prompt.tolist()
    frame = pandas.read_parquet(path)
    assert list(frame.step) == [7] * 4 and list(frame.staleness) == [6] * 4
    assert frame.logprobs[0].dtype == np.float32 and frame.response_tokens[1].tolist() == odd.response_tokens


def test_datasets_reads_it(tmp_path):
    """Promise: `datasets` reads a step's file as it is."""
    from datasets import Dataset

    files.write(tmp_path, 1, [[made(0, 20).whole, made(1, 30).whole]])
    loaded = Dataset.from_parquet(str(files.path_of(tmp_path, 1)), cache_dir=str(tmp_path / "cache"))
    assert loaded[1]["response_tokens"] == made(1, 30).response_tokens and loaded.num_rows == 2


def test_half_the_bytes(tmp_path):
    """Promise: little more than half of the 8 bytes per token in payload files, of tokens as in text and a
    policy that is certain of two in three; bench/archive.py has more."""
    wholes = [made(i, 2_000).whole for i in range(64)]
    size = files.write(tmp_path, 1, [wholes])
    assert size.bytes / (64 * 2_000) <= BYTES_PER_TOKEN_MAX


def test_a_write_that_fails_leaves_no_file(tmp_path):
    """Promise: no step has half a file."""

    def parts():
        yield [made(0, 10).whole]
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        files.write(tmp_path, 1, parts())
    assert files.steps(tmp_path) == [] and list((tmp_path / files.FOLDER).iterdir()) == []


def test_what_is_no_such_file_is_damaged(tmp_path):
    """Promise: who reads the archive hears of one error, whatever Parquet makes of the file."""
    path = tmp_path / "step_000001.parquet"
    path.write_bytes(b"no Parquet at all")
    with pytest.raises(DamagedResponse):
        list(files.read(path))
    pandas.DataFrame({"trajectory_id": [1]}).to_parquet(path)
    with pytest.raises(DamagedResponse, match="other columns"):
        list(files.read(path))


@given(st.integers(1, 50), st.integers(1, 60), st.integers(1, 60))
def test_what_is_kept(number, step, newest):
    """Promise: all; the last N; the multiples of N. The file just written stays with `last`."""
    step = min(step, newest)
    assert kept("all", step, newest)
    assert kept(f"last:{number}", step, newest) == (newest - step < number)
    assert kept(f"every:{number}", step, newest) == (step % number == 0)


def test_pruning(tmp_path):
    """Promise: the disk holds what the rule keeps, and nothing half-written of a writer that died."""
    for step in range(1, 8):
        files.write(tmp_path, step, [[made(step, 3).whole]])
        files.prune(tmp_path, "last:3", step)
    assert files.steps(tmp_path) == [5, 6, 7]
    left = files.path_of(tmp_path, 8).with_name(".step_000008.parquet.new")
    left.write_bytes(b"half")
    files.prune(tmp_path, "every:3", 7)
    assert files.steps(tmp_path) == [6] and not left.exists()
    assert pq.ParquetFile(files.path_of(tmp_path, 6)).metadata.num_rows == 1
