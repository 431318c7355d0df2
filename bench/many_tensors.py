"""What a publication of very many tensors costs beside its bytes: the layout, what goes before and behind the
chunks, and a slot's manifest and header, for the names of a mixture of experts.

    python bench/many_tensors.py [--json PATH]

The names are Qwen3-30B-A3B's (18,867 tensors), the shapes are small: what is counted does not depend on
them. CPU seconds, the least of `--repeats` rounds. A sender lays out and encodes, a relay decodes, encodes
for the next one and writes a slot; the controller sees none of it. Goal: `relay_cpu_seconds` below 1.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import common

from laminar_hpc.weights import manifest, stream

LAYERS, EXPERTS, HIDDEN = 48, 128, 32
CHUNK = 1 << 20
COLUMNS = ("what", "who", "cpu_seconds")
Result = TypeVar("Result")


def names() -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of each tensor."""
    found: list[tuple[str, tuple[int, ...], str]] = [("model.embed_tokens.weight", (500, HIDDEN), "bfloat16")]
    attention = [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    for layer in range(LAYERS):
        experts = [
            f"mlp.experts.{expert}.{part}_proj"
            for expert in range(EXPERTS)
            for part in ("gate", "up", "down")
        ]
        parts = [*attention, "input_layernorm", "post_attention_layernorm", "mlp.gate", *experts]
        found += [(f"model.layers.{layer}.{part}.weight", (4, HIDDEN), "bfloat16") for part in parts]
    last = [("model.norm.weight", (HIDDEN,), "bfloat16"), ("lm_head.weight", (500, HIDDEN), "bfloat16")]
    return [*found, *last]


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    rows: list[dict[str, object]] = []

    def timed(what: str, who: str, work: Callable[[], Result]) -> Result:
        seconds = []
        for _ in range(max(1, options.repeats)):
            begin = time.process_time()
            result = work()
            seconds.append(time.process_time() - begin)
        rows.append({"what": what, "who": who, "cpu_seconds": min(seconds)})
        return result

    tensors = names()
    whole = timed("layout", "sender", lambda: manifest.layout(tensors, 1, 0))
    header = timed("header of the stream", "both", lambda: stream.encode_header(whole, CHUNK))
    timed("header read", "relay", lambda: stream.decode_header(header))
    timed("chunks", "both", lambda: stream.chunks(whole, CHUNK))
    sums = timed("sums", "both", lambda: stream.encode_sums([(1, 2)] * len(tensors)))
    timed("sums read", "relay", lambda: stream.take_sums(whole, sums))
    timed("manifest of the slot", "relay", lambda: manifest.encode_manifest(whole))
    timed("safetensors header", "relay", lambda: manifest.safetensors_header(whole))
    figures = {
        f"{who}_cpu_seconds": sum(float(str(r["cpu_seconds"])) for r in rows if r["who"] in (who, "both"))
        for who in ("sender", "relay")
    }
    common.finish(options, {"tensors": len(tensors), **figures}, rows, COLUMNS)


if __name__ == "__main__":
    main()
