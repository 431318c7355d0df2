"""Makes SGLang fork its scheduler and detokenizer instead of starting them from nothing: an engine on the CPU is up in half the time.

The child gets what the launcher has imported (some six seconds of work) for nothing. Only where there is no CUDA: a fork cannot use it.
At the time of the fork the launcher has one thread and has run no tensor operation.
"""

import multiprocessing


def after_environment(result: object, *_: object, **__: object) -> None:
    """Hook: SGLang has just chosen "spawn"."""
    multiprocessing.set_start_method("fork", force=True)


def register() -> None:
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", after_environment, HookType.AFTER)
