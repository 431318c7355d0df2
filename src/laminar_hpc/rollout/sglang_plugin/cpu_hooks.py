"""What makes an engine on the CPU start and run faster: its processes are forked, and attention is batched (attention.py).

Registered by `port.register` where there is no CUDA; both are hooks of SGLang's own registry.
"""

import multiprocessing


def fork_children(result: object, *_: object, **__: object) -> None:
    """Hook after SGLang has chosen "spawn": the scheduler and the detokenizer are forked, and get the launcher's imports for nothing.

    At that time the launcher has one thread and has run no tensor operation; a process that uses CUDA could not be forked.
    """
    multiprocessing.set_start_method("fork", force=True)


def register() -> None:
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from laminar_hpc.rollout.sglang_plugin import attention

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", fork_children, HookType.AFTER)
    HookRegistry.register(attention.TARGET, attention.BatchedAttention, HookType.REPLACE)
