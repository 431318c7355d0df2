"""Bytes per token and tokens per second of the archive (store/archive/table.py), of made responses and of
runs.

    python bench/archive.py [--json PATH] [RUN_DIR ...]

Made tokens are drawn by Zipf's law, made log-probs by a softmax in float32: once of a policy that is certain
of most tokens (63 % above -0.001), as reasoning models are, once of one that is certain of few. Of each
RUN_DIR what the store has trained is written again.

Goal: `archive_bytes_per_token`, of the made responses that take most, at most 4.
"""

import sqlite3
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import common
import numpy as np

from laminar_hpc.line.messages.data import Trajectory, VersionSpan
from laminar_hpc.report.export import rows as exported
from laminar_hpc.store.archive import files
from laminar_hpc.store.payload.layout import Response, drawn, pack, packed_digest
from laminar_hpc.store.payload.whole import Whole

RESPONSES, TOKENS = 64, 16_384
COLUMNS = ("responses", "tokens", "archive_bytes_per_token", "million_tokens_per_cpu_second")
MARGINS = {"certain": (9.0, 6.0), "uncertain": (1.0, 2.0)}  # mean and spread of logits over all others


def made(trajectory_id: int, kind: str) -> Whole:
    draw = np.random.default_rng(trajectory_id)
    tokens = np.minimum(draw.zipf(1.3, TOKENS), 150_000).astype(np.int32)
    margins = draw.normal(*MARGINS[kind], TOKENS).astype(np.float32)
    spans = [VersionSpan(1, 0, TOKENS)]
    response = Response(
        trajectory_id, 0, tokens, -np.log(np.float32(1) + np.exp(-margins)), spans, drawn(TOKENS, spans)
    )
    numbers = (trajectory_id, trajectory_id // 16, 0, 0, 1, 1, TOKENS, TOKENS, 1)
    record = Trajectory(*numbers, "stop", 1.0, 2.0, digest=packed_digest(pack(response)))
    return Whole(record, tokens[:200], response)


def measured(name: str, parts: Iterable[list[Whole]]) -> dict:
    count, begun = 0, time.process_time()

    def counted() -> Iterable[list[Whole]]:
        nonlocal count
        for part in parts:
            count += sum(len(whole.response.tokens) for whole in part)
            yield part

    with tempfile.TemporaryDirectory(prefix="laminar-archive-") as folder:
        size = files.write(Path(folder), 1, counted())
    seconds = time.process_time() - begun
    return {
        "responses": name,
        "tokens": count,
        "archive_bytes_per_token": size / max(1, count),
        "million_tokens_per_cpu_second": count / seconds / 1e6,
    }


def of_run(run_dir: Path) -> dict:
    """All that it has trained, in one file."""
    uri = f"{(run_dir / 'store.sqlite').resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as db:
        return measured(str(run_dir), (part for _, part in exported.parts(db, run_dir, 1, 1 << 30)))


def main() -> None:
    options = common.options_of(__doc__ or "")
    options.add_argument("runs", nargs="*", type=Path, metavar="RUN_DIR")
    chosen = options.parse_args()
    measured("", [[made(0, "certain")]])  # imports and the first use of a codec
    rows = [measured(kind, [[made(i, kind) for i in range(RESPONSES)]]) for kind in MARGINS]
    rows += [of_run(run_dir) for run_dir in chosen.runs]
    largest = max(row["archive_bytes_per_token"] for row in rows[: len(MARGINS)])
    common.finish(chosen, {"archive_bytes_per_token": largest}, rows, COLUMNS)


if __name__ == "__main__":
    main()
