"""SGLang's entry point for platforms (group `sglang.srt.platforms`): the CPU platform where there is no CUDA, nothing where there is.

SGLang calls `activate` once in each of its processes, before it imports a model. On a GPU it returns None: plain SGLang.
"""

import sys

import torch

_torchvision_schemas = None


def declare_torchvision_schemas() -> None:
    """Let `import torchvision` succeed where its compiled part cannot load.

    The published wheel is built for CUDA; under CPU torch only its two operator schemas are missed by the pure-Python part.
    """
    global _torchvision_schemas
    if _torchvision_schemas is None and "torchvision" not in sys.modules:
        _torchvision_schemas = torch.library.Library("torchvision", "FRAGMENT")  # the schemas live as long as this object
        for name in ("nms", "qnms"):
            _torchvision_schemas.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def activate() -> str | None:
    """The dotted path of our platform class, or None where CUDA exists."""
    if torch.cuda.is_available():
        return None
    declare_torchvision_schemas()
    return "laminar_hpc.rollout.sglang_plugin.cpu_platform:CpuPlatform"
