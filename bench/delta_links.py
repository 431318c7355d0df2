"""From which link speed on sending changes pays: a whole publication in full and as changes, over TCP between
two network namespaces at several rates.

    python bench/delta_links.py --json links.json     512 MB at 1 and 10 Gbit/s

The real publisher, controller and relay (chain_roles.py); the cables are limited by
tc, which needs root and iproute2, and everything is taken away afterwards. Seconds are from the trainer's
request for a weight id to the relay's last sum, medians of publications of one kind; a changed element is
another one at each step, and they lie evenly. The fractions are those that bench/deltas.py finds at learning
rates of 1e-6 and 5e-5.

Figures: `full_over_changes_MBIT_FRACTION`, how many times as long a full publication takes.
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import common
import torch
from chain_roles import ChainRun, RandomModel
from network import Network, missing

from laminar_hpc.machine.observability import trace
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.stream import TensorSpan

SECONDS = 120.0  # for any one publication
COLUMNS = ["mbit", "changed", "full", "changes", "full over changes", "bytes over full", "full Gbit/s"]


class StillModel(RandomModel):
    """Bfloat16 weights in memory, of which every `every`-th element changes from one step to the next."""

    def __init__(self, run_dir: Path, size: int, every: int) -> None:
        super().__init__(run_dir, size)
        self._image = torch.randint(0, 1 << 15, (size // 2,), dtype=torch.int16)
        self._stride, self._packed_step = every, 0

    def canonical_metadata(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        each = self._image.numel() // 8
        return [(f"w{number}", (each,), torch.bfloat16) for number in range(8)]

    def pack(
        self, spans: Sequence[TensorSpan], bucket: torch.Tensor, lane: int
    ) -> Callable[[], list[tuple[int, int]]]:
        """Copies from memory, as a trainer's own weights are; the step changes them before the first byte."""
        if self._packed_step != self.step:
            self._image[self.step % self._stride :: self._stride] += 1
            self._packed_step = self.step
        whole, sums = self._image.view(torch.uint8), []
        each = whole.numel() // 8
        for span in spans:  # of 16-bit elements; sums are over 32-bit words
            part = bucket[span.offset : span.offset + 2 * (span.last - span.first)]
            start = span.tensor * each + 2 * span.first
            part.copy_(whole[start : start + part.numel()])
            sums.append(tensor_sums(part, span.first // 2))
        return lambda: sums


def publications(mbit: int, every: int, delta: str, repeats: int, size: int, folder: Path) -> dict:
    """Seconds of `repeats` publications of a kind, and the share of the bytes that left."""
    with Network(2, mbit) as net:
        run = ChainRun(
            folder,
            1,
            size,
            f"relay.delta={delta}",
            "model.dtype=bfloat16",
            host=net.address(0),
            namespace=lambda who: net.namespace(0 if who == "trainer" else 1),
            model=functools.partial(StillModel, every=every),
        )
        try:
            for _ in range(repeats + 2):  # the first one is in full; the second warms up what compares
                run.publish()
                run.until(lambda: run.held(0) >= run.step, "a publication is late", SECONDS)
        finally:
            run.close()
    spans = trace.read_spans(run.run_dir)
    begun = {span.fields["weight_id"]: span for span in spans["trainer0"] if span.kind == "send"}
    done = {span.fields["weight_id"]: span.t1 for span in spans["relay0"] if span.kind == "relay"}
    took = [done[each] - begun[each].t0 for each in sorted(done)][2:]
    lines = map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines())
    sent = [line["bytes_over_full"] for line in lines if line["kind"] == "publish"][2:]
    return {"seconds": statistics.median(took), "all": took, "bytes": statistics.median(sent)}


def main() -> None:
    parser = common.options_of(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=5, help="of each kind, for medians (default 5)")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the weights (default 512)")
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 10000], help="default 1000 10000")
    parser.add_argument("--changed", type=float, nargs="+", default=[0.004, 0.185])
    chosen = parser.parse_args()
    if missing():
        raise SystemExit(f"delta_links: error: {missing()}")
    size = chosen.megabytes * 1_000_000 // 64 * 64
    rows = [row(chosen, mbit, changed, size) for mbit in chosen.mbit for changed in chosen.changed]
    figures = {f"full_over_changes_{r['mbit']}_{r['changed']:g}": r["full over changes"] for r in rows}
    common.finish(chosen, figures, rows, COLUMNS)


def row(chosen: argparse.Namespace, mbit: int, changed: float, size: int) -> dict:
    """Both kinds at one rate, one behind the other."""
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        every = round(1 / changed)
        full, changes = (
            publications(mbit, every, delta, chosen.repeats, size, Path(folder) / delta)
            for delta in ("off", "auto")
        )
    print(f"  {mbit} Mbit/s, {changed:.1%}: {full['seconds']:.2f} s", file=sys.stderr, flush=True)
    return {
        "mbit": mbit,
        "changed": changed,
        "full": full["seconds"],
        "changes": changes["seconds"],
        "full over changes": full["seconds"] / changes["seconds"],
        "bytes over full": changes["bytes"],
        "full Gbit/s": 8e-9 * size / full["seconds"],
        "all full": full["all"],
        "all changes": changes["all"],
    }


if __name__ == "__main__":
    main()
