"""The torch.distributed world of the trainers: they alone, over the store of their own torchrun."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from laminar_hpc.cluster.address import own_address
from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.config.errors import LaminarError


def init_trainer_world(context: RoleContext) -> None:
    """Makes the default group of all trainers (NCCL on GPUs, gloo else); afterwards dist.get_rank() is the trainer's index."""
    config = context.config
    trainers = config.trainer.tensor_parallel * config.trainer.pipeline_parallel * config.trainer.data_parallel
    seconds = timedelta(seconds=config.cluster.join_timeout_seconds)
    if own_address(config.cluster.host).startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())  # one where cluster/devices.py has chosen
    try:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=seconds)
        prefix = dist.PrefixStore(f"laminar-trainers/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo", store=prefix, rank=context.index, world_size=trainers, timeout=seconds
        )
    except (dist.DistError, RuntimeError) as error:
        raise LaminarError(f"the {trainers} trainer ranks did not meet within {seconds.seconds} s: {str(error).splitlines()[0]}") from None
