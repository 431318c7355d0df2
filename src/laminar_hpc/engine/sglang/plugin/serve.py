"""The engine process: `python -m laminar_hpc.engine.sglang.plugin.serve <SGLang's server arguments>`,
started by process.py.

It is SGLang's own launcher, but: it dies with its parent; the API key comes from a file (arguments and
environments stand in the process list), and nothing is answered without it; and a missing installation of
our entry points is said in one line instead of by a crash deep inside SGLang.
"""

import os
import sys
from importlib.metadata import entry_points

from laminar_hpc.engine.sglang import speculation
from laminar_hpc.engine.sglang.plugin import key
from laminar_hpc.machine.collector import importing
from laminar_hpc.machine.devices import present
from laminar_hpc.machine.observability import output
from laminar_hpc.machine.processes import die_with_parent

PARENT_VARIABLE = "LAMINAR_ENGINE_PARENT"


def check_plugins() -> None:
    """SGLang's processes find our plugins through the installed package's entry points only; ends the process
    when they are not there."""
    for group, name in (("sglang.srt.platforms", "laminar_cpu"), ("sglang.srt.plugins", "laminar_port")):
        if name not in entry_points(group=group).names:
            sys.exit(
                f"SGLang does not find the plugin {name}: install this package in {sys.prefix} (make setup)"
            )


def check_gpus() -> None:
    """An engine that was given GPUs would run on the CPU where torch cannot use them; ends the process."""
    import torch

    if present() and not torch.cuda.is_available():
        why = "a build without CUDA" if torch.version.cuda is None else f"of CUDA {torch.version.cuda}"
        sys.exit(
            f"SGLang finds no GPU, though this engine has {', '.join(present())}: torch {torch.__version__} "
            f"is {why}; make setup CUDA=13, or look at nvidia-smi for the driver's version"
        )


def leave_freeze_gc_to_us() -> None:
    """SGLang's own call of /freeze_gc (http_server.py:2473) comes before its server listens, and its failure
    fills the log; server.py calls it later."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup"
    HookRegistry.register(target, lambda *_: None, HookType.REPLACE)


def hook_server() -> None:
    """What is hooked in this process only."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from laminar_hpc.engine.sglang.plugin import hooks

    leave_freeze_gc_to_us()
    hooks.register_in_server()
    HookRegistry.apply_hooks()


def import_server() -> None:
    """SGLang's server with our plugins; ends the process where it could not run as it was asked to."""
    check_gpus()
    from laminar_hpc.engine.sglang.plugin import platform

    platform.activate()  # older SGLang imports torchvision before it asks for a platform
    from sglang.srt.plugins import load_plugins

    load_plugins()
    hook_server()
    if speculation.asked_for(sys.argv):
        from laminar_hpc.engine.sglang.plugin.speculation import register

        register()
    import sglang.srt.entrypoints.http_server  # noqa: F401


def main() -> None:
    """Runs SGLang's server with our plugin in this process, until the parent ends."""
    # SGLang asks the kernel the same for the processes that it starts, so none is left behind
    die_with_parent()
    output.guard()
    if os.environ.pop(PARENT_VARIABLE, str(os.getppid())) != str(os.getppid()):
        sys.exit("the parent of this engine died before the engine was up")
    check_plugins()
    with importing():
        import_server()
    from sglang.srt.entrypoints.http_server import app, launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    secret = key.take()
    arguments = prepare_server_args([*sys.argv[1:], *(["--api-key", secret] if secret else [])])
    if secret:
        arguments.api_key = secret  # what was parsed is a plain text
        app.add_middleware(key.KeyRequired, key=secret)
    try:
        launch_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
