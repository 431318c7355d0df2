"""The torch.distributed world of the trainers: they alone, over a store of trainer 0's.

Not over torchrun's, which listens on all interfaces.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.address import own_address
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.training import TrainersMeet
from laminar_hpc.machine.devices import present
from laminar_hpc.machine.files.open_files import allow_connections
from laminar_hpc.machine.numa import stay_near
from laminar_hpc.trainer.megatron.deterministic import become_deterministic
from laminar_hpc.weights.links.meeting import host_store, reach_store
from laminar_hpc.weights.links.streams import streams_of


def init_trainer_world(context: RoleContext) -> None:
    """Makes the default group of all trainers (NCCL on GPUs, gloo else); afterwards dist.get_rank() is the
    trainer's index."""
    config = context.config
    trainers = config.trainer.ranks
    seconds = timedelta(seconds=config.cluster.join_timeout_seconds)
    refuse_unusable_gpus()
    become_deterministic(config)
    allow_connections(trainers, meshes=True)
    device: torch.device | None = None
    if torch.cuda.is_available():
        # one where machine/devices.py has chosen
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        stay_near(streams_of(device).name)
    try:
        dist.init_process_group(
            "nccl" if device is not None else "gloo",
            device_id=device,  # else NCCL makes a communicator for each pair of ranks that sends
            store=_store(context, trainers, seconds.total_seconds()),
            rank=context.index,
            world_size=trainers,
            timeout=seconds,
        )
    except (dist.DistError, RuntimeError) as error:
        raise LaminarError(
            f"the {trainers} trainer ranks did not meet within {seconds.seconds} s: "
            f"{str(error).splitlines()[0]}"
        ) from None


def refuse_unusable_gpus() -> None:
    """Raises LaminarError where this rank was given GPUs and torch finds fewer: training would go on silently
    on the CPU."""
    given = present()
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= len(given):
        return
    if torch.version.cuda is None:
        raise LaminarError(
            f"this machine has GPUs and torch {torch.__version__} is a build without CUDA: make setup "
            "CUDA=13, or for a run on the CPU export CUDA_VISIBLE_DEVICES="
        )
    raise LaminarError(
        f"CUDA finds {found} of the GPUs CUDA_VISIBLE_DEVICES={','.join(given)}: look at "
        "nvidia-smi -L; a MIG slice is named by its UUID (MIG-...), and a driver older than torch's CUDA "
        f"{torch.version.cuda} finds none"
    )


def _store(context: RoleContext, trainers: int, seconds: float) -> Store:
    """Listens at the address at which the others reach this machine, and nowhere else."""
    if context.index == 0:
        address = own_address(context.config.cluster.host)
        store, port = host_store(address, seconds)
        if trainers > 1:
            context.channel.send(TrainersMeet(address, port))
        return store
    place = context.channel.wait(TrainersMeet, timeout=seconds)
    if place is None:
        raise LaminarError(
            f"trainer {context.index} waited {seconds:.0f} s for trainer 0 to say where the trainers meet"
        )
    assert isinstance(place, TrainersMeet)
    return reach_store(place.address, place.port, seconds)
