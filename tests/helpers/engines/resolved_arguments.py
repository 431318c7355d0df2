"""What SGLang makes of an engine's arguments on a GPU that is not here: a program of test_gpu_arguments.py.

    python resolved_arguments.py < [[GPU, argument words], ...]  > [resolved values, ...]

Only what SGLang asks of CUDA, nvidia-smi and installed packages is answered here; all that follows is
SGLang's own code. Each GPU has a process of its own, forked from this one: SGLang remembers answers.
"""

import importlib.machinery
import json
import os
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch

# name -> compute capability, memory in MiB as nvidia-smi prints it
GPUS = {
    "A10G": ((8, 6), 23028),
    "A100": ((8, 0), 81920),
    "H100": ((9, 0), 81559),
    "B200": ((10, 0), 183359),
}
FIELDS = (
    "device dtype attention_backend sampling_backend page_size disable_overlap_schedule mem_fraction_static "
    "max_total_tokens chunked_prefill_size"
).split()


class KernelPackages:
    """Imports of packages of kernels that are installed on GPU machines only: whatever is asked of them is
    there, and nothing of it is called here."""

    NAMES = ("flashinfer", "sgl_kernel", "deep_gemm", "cutlass", "cuda")

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in self.NAMES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = self._anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass

    @staticmethod
    def _anything(name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def pretend(name: str) -> None:
    """From here on torch finds eight of these GPUs, and CUDA 13."""
    capability, mebibytes = GPUS[name]
    properties = SimpleNamespace(
        name=f"NVIDIA {name}",
        major=capability[0],
        minor=capability[1],
        total_memory=mebibytes << 20,
        multi_processor_count=132,
    )
    torch.version.cuda = "13.0"
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: capability,
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (mebibytes << 20, mebibytes << 20),
    }
    for function, answer in answers.items():
        setattr(torch.cuda, function, answer)


def resolved(name: str, words: list[str]) -> dict:
    """The values of FIELDS, and the largest batch in a CUDA graph; 0: no graphs."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import common

    pretend(name)
    for function in vars(common).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    common.get_nvgpu_memory_capacity = lambda: float(GPUS[name][1])
    arguments = prepare_server_args(words)
    arguments.resolve_once()
    view = resolved_view(arguments)
    graphs = view.cuda_graph_config.decode
    largest = 0 if "disabled" in str(graphs.backend).lower() else graphs.max_bs
    return {**{field: getattr(view, field) for field in FIELDS}, "graphs": largest}


def main() -> None:
    import laminar_hpc.machine.compat.torchvision  # noqa: F401  (before transformers)

    asked = json.load(sys.stdin)
    sys.meta_path.append(KernelPackages())
    pretend(asked[0][0])
    import sglang.srt.model_loader
    import sglang.srt.server_args  # noqa: F401  (once for all)

    found: list[dict | None] = [None] * len(asked)
    for name in dict.fromkeys(gpu for gpu, _ in asked):
        read_end, write_end = os.pipe()
        if os.fork() == 0:
            mine = [(i, resolved(gpu, words)) for i, (gpu, words) in enumerate(asked) if gpu == name]
            with os.fdopen(write_end, "w") as file:
                json.dump(mine, file)
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end) as file:
            for i, values in json.load(file):
                found[i] = values
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
