"""By which way weights cross a link: NCCL, from device to device, or host memory. Pure; used by links.py.

The sending end decides, as both ends must do the same. NCCL refuses two ranks on one device, and on one
machine it gains nothing: the receiver wants the bytes in host memory, so they leave the device once, into
memory that it maps.
"""

import msgspec

from laminar_hpc.config.errors import PermanentFailure
from laminar_hpc.machine.devices import is_slice, present
from laminar_hpc.machine.processes import boot

NCCL, HOST = "nccl", "host"


class LinkEndpoint(msgspec.Struct, frozen=True):
    """One end of a link: its machine, by this boot of its kernel, and its device, "" for none."""

    machine: str
    device: str


def end_here(device: str) -> LinkEndpoint:
    """This process, with `device`. A slice of a GPU (MIG) is none to NCCL, which knows all slices of a GPU by
    one name."""
    if present() and is_slice(present()[0]):
        device = ""
    return LinkEndpoint(boot(), device)


def choose(wanted: str, sender: LinkEndpoint, receiver: LinkEndpoint, peer: str) -> str:
    """NCCL or HOST, for relay.transport=`wanted`. Raises PermanentFailure where NCCL is wanted and cannot
    be."""
    devices = bool(sender.device and receiver.device)
    if wanted == "auto":
        return NCCL if devices and sender.machine != receiver.machine else HOST
    if wanted == NCCL and not devices:
        raise PermanentFailure(
            f"relay.transport=nccl: {'this process' if not sender.device else peer} has no GPU, "
            "and NCCL passes weights between GPUs only; use relay.transport=auto"
        )
    if wanted == NCCL and sender.device == receiver.device:
        raise PermanentFailure(
            f"relay.transport=nccl: this process and {peer} use one GPU, and NCCL links no two processes on "
            "one; use relay.transport=auto, or give them GPUs of their own (trainer.devices, rollout.devices)"
        )
    return wanted
