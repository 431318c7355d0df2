"""SGLang's entry point for platforms (group `sglang.srt.platforms`): the CPU platform where there is no CUDA,
nothing where there is.

SGLang calls `activate` once in each of its processes, before it imports a model. On a GPU it returns None:
plain SGLang.
"""

import torch


def activate() -> str | None:
    """The dotted path of our platform class, or None where CUDA exists."""
    if torch.cuda.is_available():
        return None
    import laminar_hpc.machine.compat.torchvision  # noqa: F401  (declares what torchvision misses beside a CPU torch)

    return "laminar_hpc.engine.sglang.plugin.cpu_platform:CpuPlatform"
