"""What a trainer's process does not import."""

import subprocess
import sys


def test_weights_and_biases_is_left_to_the_controller():
    """Promise: Megatron finds no wandb, whose import takes 20 s of a processor there; whoever asks for it
    later does."""
    program = (
        "import importlib.util, sys, laminar_hpc.trainer; assert 'megatron.core' in sys.modules\n"
        "print('wandb' in sys.modules, importlib.util.find_spec('wandb') is not None)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr
