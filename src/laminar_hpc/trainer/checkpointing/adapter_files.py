"""hf/ of a checkpoint of a run that trains a low-rank adapter: a directory as PEFT writes it, with the
tokenizer's files of the model. Used by trainer/checkpoint.py in the place of hf_files.py.

PEFT reads one file, so rank 0 gathers the tensors, which are some megabytes, and writes it.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from laminar_hpc.config.adapters import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from laminar_hpc.config.models import SIDE_FILES
from laminar_hpc.machine.files import durable
from laminar_hpc.machine.files.durable import FileSum
from laminar_hpc.trainer.checkpointing.copies import HostCopies, Wanted
from laminar_hpc.trainer.checkpointing.hf_files import Collected, write_tensors
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.weights.adapters import adapter_config

_OF_THE_MODEL = ("config.json", "generation_config.json")  # they make a directory that of a whole model


class AdapterFiles:
    """Of one policy with an adapter; its methods are those of HfFiles."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self._policy = policy
        self.wanted: list[Wanted] = []  # what `collect` gives is a copy already

    def collect(self, copies: HostCopies | None) -> Collected:
        """On rank 0 a copy of the adapter in host memory. Collective."""
        cpu = torch.device("cpu")
        tensors = [(name, t.to(cpu, copy=True)) for name, t in self._policy.canonical_tensors()]
        return [(ADAPTER_FILE, tensors)] if dist.get_rank() == 0 else []

    def write(self, folder: Path, files: Collected, check: Callable[[], None]) -> dict[str, FileSum]:
        """What `collect` gave, into `folder`, which is there; returns when all of it is on the disk. Raises
        OSError."""
        sums = write_tensors(folder, files, check)
        if files:
            model = self._policy.config.model
            text = json.dumps(adapter_config(model.lora, model.path), indent=2) + "\n"
            (folder / ADAPTER_CONFIG_FILE).write_text(text)
            sums[ADAPTER_CONFIG_FILE] = durable.seal(folder / ADAPTER_CONFIG_FILE)
            for beside in SIDE_FILES:
                if beside not in _OF_THE_MODEL and (Path(model.path) / beside).exists():
                    (folder / beside).parent.mkdir(exist_ok=True)
                    shutil.copyfile(Path(model.path) / beside, folder / beside)
                    sums[beside] = durable.seal(folder / beside)
        return sums
