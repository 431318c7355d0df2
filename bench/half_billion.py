"""Half a billion parameters through the whole system on this machine: loaded, published, pulled, generated
from, trained one step.

    python bench/half_billion.py --json half.json     Qwen2.5-0.5B's shape, bfloat16, one run; needs
                                                      21 GB of free memory
    python bench/half_billion.py --layers 2           a third of it: fewer layers behind the same embedding

The weights are random and made on the fly, the tokenizer is the example's (its ids are the first of the
vocabulary), prompts and responses are a few tokens. It is about room and time limits, not about learning. The
table shows each process's peak of resident memory (VmHWM, which counts mapped pages of the weight slots too)
as it was last seen, the figures also the seconds of each part.

Goal: it runs through, and the weights that the replica opened are verified.
"""

import json
import shutil
import threading
import time
from pathlib import Path

import common
import psutil
import torch
from shapes import TOKENIZER_FILES, tensors

from laminar_hpc.config.check import count_parameters
from laminar_hpc.config.load import load_config
from laminar_hpc.config.models import WEIGHTS_FILE
from laminar_hpc.machine.roles import assign_roles
from laminar_hpc.report.rundata import Run
from laminar_hpc.weights.manifest import Manifest, layout, safetensors_header

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SETTINGS = {
    "steps": 1,
    "model.dtype": "bfloat16",
    "algorithm.prompts_per_step": 2,
    "algorithm.samples_per_prompt": 2,
    "algorithm.minibatches_per_step": 1,
    "sampling.max_response_tokens": 8,
    "trainer.tokens_per_microbatch": 64,
    "rollout.kv_cache_tokens": 2048,
    "rollout.max_concurrent": 4,
    "evaluation.files": "[]",
    "relay.slots": 2,
    "relay.publish_timeout_seconds": 600,
    "rollout.engine_start_seconds": 900,
    "cluster.join_timeout_seconds": 900,
    "cluster.heartbeat_timeout_seconds": 120,
}
ROOM = (4.0, 34.0)  # GB and bytes per parameter that the processes take between them
CHUNK = 1 << 22  # weights drawn at once
SAMPLE_SECONDS = 0.25
COLUMNS = ("process", "peak GB")


def check_room(parameters: int) -> None:
    """Raises SystemExit when this machine has too little free memory: the kernel would end whatever it
    likes."""
    needed, free = ROOM[0] + ROOM[1] * parameters / 1e9, psutil.virtual_memory().available / 1e9
    if free < needed:
        raise SystemExit(
            f"{parameters / 1e6:.0f} M parameters need about {needed:.0f} GB of free memory, "
            f"{free:.0f} are; lower --layers"
        )


def make_model(folder: Path, tokenizer: Path, layers: int) -> Manifest:
    """A Hugging Face directory with random weights, of which a few MB at a time are in memory."""
    shape = SHAPE | {"num_hidden_layers": layers}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape))
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, folder / name)
    manifest = layout(tensors(shape), 0, 0)
    torch.manual_seed(0)
    with open(folder / WEIGHTS_FILE, "wb") as file:
        file.write(safetensors_header(manifest))
        for entry in manifest.tensors:
            items = entry.nbytes // 2
            for first in range(0, items, CHUNK):
                count = min(CHUNK, items - first)
                values = torch.ones(count) if "norm" in entry.name else torch.randn(count).mul_(0.02)
                file.write(values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return manifest


class Peaks(threading.Thread):
    """Watches the processes below this one and keeps the highest VmHWM of each, in bytes, under the name of
    its part."""

    def __init__(self, roles: list[str]) -> None:
        super().__init__(daemon=True)
        self.roles, self.found, self.over = roles, {}, threading.Event()

    def run(self) -> None:
        while not self.over.wait(SAMPLE_SECONDS):
            for process in psutil.Process().children(recursive=True):
                try:
                    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
                    name = self.part(process)
                except (OSError, StopIteration, psutil.Error):
                    continue  # it has just ended
                self.found[name] = max(peak, self.found.get(name, 0))

    def part(self, process: psutil.Process) -> str:
        words = process.cmdline()
        if words[0].startswith("sglang::"):
            return f"engine, {words[0].removeprefix('sglang::')}"
        for module, name in (
            ("sglang.plugin.serve", "engine, server"),
            ("environments.workers", "reward worker"),
            ("torch.distributed.run", "torchrun"),
        ):
            if any(module in word for word in words):
                return name
        if "laminar_hpc" in words:
            return self.roles[int(process.environ().get("RANK", "0"))]
        return "laminar train" if any(word.endswith("laminar_hpc.launch.cli") for word in words) else "others"


def seconds(run: Run, kind: str, pick: type = max) -> float | None:
    """The longest span of a kind."""
    return pick(
        (span.t1 - span.t0 for spans in run.spans.values() for span in spans if span.kind == kind),
        default=None,
    )


def main() -> None:
    options = common.parser(__doc__ or "")
    options.set_defaults(repeats=1, run_seconds=3000.0)
    options.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="default 24")
    options = options.parse_args()
    rows, figures = [], {}
    with common.run_folder(options) as folder:
        check_room(count_parameters(SHAPE | {"num_hidden_layers": options.layers}))
        base = load_config([f"experiment={options.experiment}"])
        manifest = make_model(folder / "model", Path(base.model.path), options.layers)
        figures |= {
            "parameters_billion": manifest.data_bytes / 2e9,
            "published_gb": manifest.data_bytes / 1e9,
        }
        peaks = Peaks([f"{rank.role} {rank.index}" for rank in assign_roles(1, 1, 1, 4)])
        peaks.start()
        started = time.monotonic()
        run = common.train(options, folder, "run", {**SETTINGS, "model.path": folder / "model"})
        figures["run_seconds"] = time.monotonic() - started
        peaks.over.set()
        peaks.join()
        shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)  # several GB
        opened = sorted(
            {
                span.fields["weight_id"]
                for spans in run.spans.values()
                for span in spans
                if span.kind == "pull"
            }
        )
        if not opened or not run.steps:
            raise SystemExit(
                f"the run has opened the weight ids {opened} and has made {len(run.steps)} steps"
            )
        figures |= {
            f"{kind}_seconds": seconds(run, kind)
            for kind in ("publish", "relay", "pull", "generate", "train", "checkpoint")
        }
        rows = [{"process": name, "peak GB": peak / 1e9} for name, peak in sorted(peaks.found.items())]
        figures |= {f"{name.split()[0].rstrip(',')}_peak_gb": 0.0 for name in peaks.found}
        for name, peak in peaks.found.items():
            key = f"{name.split()[0].rstrip(',')}_peak_gb"
            figures[key] = max(figures[key], peak / 1e9)
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
