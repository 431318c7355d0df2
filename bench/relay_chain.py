"""Time until the last of p relays has the weights, over links of a given rate: the chain, beside its formula,
a binary tree and a star.

- Hosts are network namespaces behind cables limited by tc; needs root and iproute2. Everything is taken away
  afterwards.
- chain: the real relays, controller and publisher of a run (chain_roles.py); from the trainer's request for a
  weight id to the last sums.
- formula: Laminar (arXiv 2510.12633), section on the relay tier, T = (p + k - 2) (M / k Tb + Ts), with the
  chunks that were used and the Ts and Tb that the trainer measured on its link.
- tree, star: same links and streams; each host sends to two others (tree), or the trainer's to all (star).

    python bench/relay_chain.py                       # 8 relays, 128 MB, 400 Mbit/s; about three minutes
    python bench/relay_chain.py --mbit 1000 --megabytes 200 --json chain.json
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import common
import torch
from chain_roles import ChainRun, enter
from network import Network, missing

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.machine.observability import trace
from laminar_hpc.machine.processes import die_with_parent
from laminar_hpc.policies.chain import best_chunks, broadcast_seconds, chunk_bytes
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.links.links import Link
from laminar_hpc.weights.links.meeting import host_store, reach_store
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.relay.chain import WeightStream, receive_stream
from laminar_hpc.weights.relay.ends import DownstreamEnd, UpstreamEnd
from laminar_hpc.weights.stream import decode_header

SECONDS = 120.0  # for any one broadcast
TENSORS = 16
COLUMNS = ["shape", "relays", "seconds", "formula", "over formula", "over one", "chunks"]


def options() -> argparse.Namespace:
    parser = common.options_of(__doc__ or "")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="measured broadcasts of each kind; figures are medians (default 3)",
    )
    parser.add_argument(
        "--mbit", type=float, default=400, help="rate of every cable in each direction (default 400)"
    )
    parser.add_argument("--megabytes", type=int, default=128, help="size of the weights (default 128)")
    parser.add_argument(
        "--relays",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        help="default 1 2 4 8; tree and star at the largest",
    )
    return parser.parse_args()


# ---- the chain: a run without a model ----------------------------------------------------------------------


def chain(relays: int, size: int, mbit: float, repeats: int, folder: Path) -> dict:
    """Median seconds of `repeats` publications, after one that warms everything up, and the formula's for the
    same."""
    with Network(relays + 1, mbit) as net:
        place = folder / f"chain{relays}"
        run = ChainRun(
            place,
            relays,
            size,
            host=net.address(0),
            namespace=lambda who: net.namespace(0 if who == "trainer" else who + 1),
        )
        try:
            everyone, link = list(range(relays)), None
            for _ in range(repeats + 1):
                run.publish()
                run.wait(everyone, run.step, SECONDS)
                time.sleep(0.2)
            link = run.publish()  # says how fast the link was until now
            run.wait(everyone, run.step, SECONDS)
        finally:
            run.close()
    spans = trace.read_spans(run.run_dir)
    begun = {span.fields["weight_id"]: span.t0 for span in spans["trainer0"] if span.kind == "send"}
    done: dict[int, list[float]] = {}
    for index in everyone:
        for span in spans[f"relay{index}"]:
            if span.kind == "relay":
                done.setdefault(span.fields["weight_id"], []).append(span.t1)
    took = [max(done[each]) - begun[each] for each in sorted(begun)][1:-1]
    assert link is not None and len(took) == repeats and all(len(times) == relays for times in done.values())
    chunk = chunk_bytes(size, relays, *link, 64 << 20)
    chunks = -(-size // chunk)
    return {
        "shape": "chain",
        "relays": relays,
        "seconds": statistics.median(took),
        "all": took,
        "chunks": chunks,
        "formula": broadcast_seconds(size, relays, chunks, *link),
        "start_seconds": link[0],
        "seconds_per_byte": link[1],
        "best_chunks": best_chunks(size, relays, *link),
    }


# ---- tree and star: the same links and streams, without a controller ---------------------------------------


def host(namespace: str, address: str, children: int, chunk: int, size: int, pipe: Connection) -> None:
    """One host of a tree: links to its children and its parent, then passes on every stream; says when one
    was complete."""
    die_with_parent()
    enter(namespace)
    torch.set_num_threads(1)
    stores = [host_store(address, SECONDS) for _ in range(children)]
    pipe.send([port for _, port in stores])
    parent = pipe.recv()
    device = torch.device("cpu")

    def link(store, sender):
        return Link(
            store,
            1,
            0,
            sender,
            "the next host" if sender else "the host before",
            address,
            device,
            SECONDS,
            meet_seconds=SECONDS,
        )

    def down(_: int, why: str) -> None:
        print(f"{namespace}: {why}", file=sys.stderr, flush=True)

    def failed(error: Exception) -> None:
        raise error

    senders = [
        DownstreamEnd(
            1, lambda _, store=store: link(store, True), down, failed, lambda stream: None, 1, 64 << 20
        )
        for store, _ in stores
    ]
    memory = torch.zeros(size, dtype=torch.uint8)
    each = size // TENSORS // 4
    if parent is None:
        memory.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
        manifest = layout([(str(i), (each,), torch.float32) for i in range(TENSORS)], 0, 0)
        for entry in manifest.tensors:
            entry.sum_words, entry.sum_indexed = tensor_sums(
                memory[entry.offset : entry.offset + entry.nbytes]
            )
        while True:
            pipe.recv()
            pipe.send(time.time())
            for sender in senders:
                sender.put(WeightStream(manifest, memory, chunk, complete=True))

    def receive(upstream: Link) -> None:
        manifest, size_of_chunk, _ = decode_header(upstream.receive_bytes(idle_seconds=SECONDS * 10))
        stream = WeightStream(manifest, memory, size_of_chunk)
        for sender in senders:
            sender.put(stream)
        receive_stream(upstream, stream)
        pipe.send(time.time())

    UpstreamEnd(1, lambda _: link(reach_store(*parent, SECONDS), False), down, failed, receive)
    pipe.recv()


def tree(shape: str, relays: int, size: int, mbit: float, repeats: int, chunk: int) -> dict:
    """As `chain`, for the host before each relay as `shape` has it."""
    before = [0 if shape == "star" else (number - 1) // 2 for number in range(1, relays + 1)]
    context = multiprocessing.get_context("forkserver")
    pipes, processes, took = [], [], []
    with Network(relays + 1, mbit) as net:
        try:
            for number in range(relays + 1):
                mine, theirs = context.Pipe()
                arguments = (
                    net.namespace(number),
                    net.address(number),
                    before.count(number),
                    chunk,
                    size,
                    theirs,
                )
                processes.append(context.Process(target=host, args=arguments))
                processes[-1].start()
                pipes.append(mine)
            ports = [answer(pipe) for pipe in pipes]
            pipes[0].send(None)
            for number, parent in enumerate(before, 1):
                pipes[number].send((net.address(parent), ports[parent].pop()))
            for _ in range(repeats + 1):
                pipes[0].send(True)
                begun = answer(pipes[0])
                took.append(max(answer(pipe) for pipe in pipes[1:]) - begun)
                time.sleep(0.2)
        finally:
            for process in reversed(processes):  # leaves first: nobody is left to complain
                process.kill()
                process.join(5)
    return {
        "shape": shape,
        "relays": relays,
        "seconds": statistics.median(took[1:]),
        "all": took[1:],
        "chunks": -(-size // chunk),
    }


def answer(pipe: Connection):
    if not pipe.poll(SECONDS):
        raise LaminarError(f"a host of the bench did not answer within {SECONDS:.0f} s")
    return pipe.recv()


def main() -> None:
    chosen = options()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of addresses without a name
    if missing():
        raise SystemExit(f"relay_chain: error: {missing()}")
    size = chosen.megabytes * 1_000_000 // (8 * TENSORS) * 8 * TENSORS
    last, rows = max(chosen.relays), []
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        for relays in chosen.relays:
            rows.append(chain(relays, size, chosen.mbit, chosen.repeats, Path(folder)))
            print(f"  chain of {relays}: {rows[-1]['seconds']:.3f} s", file=sys.stderr, flush=True)
        of = {row["relays"]: row for row in rows}
        for shape in ("tree", "star") if last > 1 else ():
            rows.append(
                tree(
                    shape,
                    last,
                    size,
                    chosen.mbit,
                    chosen.repeats,
                    -(-size // of[last]["chunks"] // 4096) * 4096,
                )
            )
            print(f"  {shape} of {last}: {rows[-1]['seconds']:.3f} s", file=sys.stderr, flush=True)
    for row in rows:
        row["over formula"] = row["seconds"] / row["formula"] if "formula" in row else None
        row["over one"] = row["seconds"] / of[1]["seconds"] if 1 in of else None
    longest = of[last]["seconds"]
    figures = {
        f"last_relay_{last}_over_1": longest / of[1]["seconds"] if 1 in of else None,
        f"last_relay_{last}_over_formula": of[last]["over formula"],
        **{
            f"{row['shape']}_over_chain_{last}": row["seconds"] / longest
            for row in rows
            if row["shape"] != "chain"
        },
    }
    print(
        f"{size / 1e6:.0f} MB over cables of {chosen.mbit:.0f} Mbit/s, medians of {chosen.repeats}; "
        + json.dumps(
            {"start_seconds": of[last]["start_seconds"], "seconds_per_byte": of[last]["seconds_per_byte"]}
        )
    )
    common.finish(chosen, figures, rows, COLUMNS)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("relay_chain: stopped; hosts and processes are taken away") from None
