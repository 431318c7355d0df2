"""Lets `import torchvision` succeed beside a CPU build of torch. Import this module before transformers or
SGLang.

PyPI's torchvision is built for CUDA: under CPU torch its compiled part cannot load, and its Python part then
fails because two operator schemas are missing. Declaring them is enough for everything that does no image
work, which is all that transformers and SGLang ask of it here. Importing this twice, or where it is not
needed, does nothing.
"""

import importlib.metadata
import sys

import torch

_library: torch.library.Library | None = None  # the schemas live as long as this object


def _is_needed() -> bool:
    """True when torch is a CPU build, torchvision is a CUDA build (its version has no `+cpu`), and nobody
    declared the schemas."""
    if (
        torch.version.cuda is not None
        or "torchvision" in sys.modules
        or hasattr(torch.ops.torchvision, "nms")
    ):
        return False
    try:
        return "+" not in importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return False


def declare_schemas() -> None:
    """Declares torchvision::nms and torchvision::qnms, without an implementation, where that is needed."""
    global _library
    if _library is None and _is_needed():
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


declare_schemas()
