"""GPUs of a machine by role: what is derived, what a list means, and what is refused in one line. No GPU is
needed."""

import os
import subprocess
import sys

import pytest
import torch

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.machine import devices
from laminar_hpc.machine.devices import devices_of, present, use_devices
from laminar_hpc.machine.roles import RoleOfRank, assign_roles
from laminar_hpc.trainer import world
from laminar_hpc.weights.links.transport import LinkEndpoint, choose, end_here


def chosen(
    count: int, trainers: int = 1, rollouts: int = 1, size: int = 1, **lists: list[int]
) -> list[list[int]]:
    """Devices of all ranks of one machine but the controller's, in rank order: trainers, relay, rollouts."""
    config = RunConfig()
    config.rollout.tensor_parallel = size
    config.trainer.devices, config.rollout.devices = lists.get("trainer"), lists.get("rollout")
    here = assign_roles(trainers, rollouts, 1, trainers + rollouts + 2)
    assert devices_of(config, here, RoleOfRank("controller", 0), count) == []
    return [devices_of(config, here, rank, count) for rank in here if rank.role != "controller"]


def test_derived():
    """Trainers first, replicas on what is left; a small machine is shared by the replicas; without GPUs
    nobody has one."""
    assert chosen(8, trainers=2, rollouts=3, size=2) == [[0], [1], [2], [2, 3], [4, 5], [6, 7]]
    assert chosen(4, trainers=2, rollouts=1, size=4) == [[0], [1], [0], [0, 1, 2, 3]]
    assert chosen(1) == [[0], [0], [0]]
    assert chosen(0, trainers=2) == [[], [], [], []]


def test_relays_are_spread_over_the_gpus():
    """Of relays apart and of one world; several on a GPU where there are fewer GPUs."""

    def of_relays(count, lanes, **lists):
        config = RunConfig()
        config.rollout.devices = lists.get("rollout")
        here = [RoleOfRank("relay", 8 + lane) for lane in range(lanes)]
        return [devices_of(config, here, rank, count) for rank in here]

    assert of_relays(8, 8) == [[device] for device in range(8)]
    assert of_relays(8, 2) == [[0], [4]] and of_relays(8, 1) == [[0]] and of_relays(0, 2) == [[], []]
    assert of_relays(1, 4) == [[0]] * 4 and of_relays(2, 4) == [[0], [0], [1], [1]]
    assert of_relays(8, 2, rollout=[4, 5, 6, 7]) == [[4], [6]]
    here = assign_roles(2, 3, 1, 8, lanes=2)
    config = RunConfig()
    config.rollout.tensor_parallel = 2
    relays = [rank for rank in here if rank.role == "relay"]
    assert [devices_of(config, here, rank, 8) for rank in relays] == [[2], [5]]


def test_lists():
    """Devices named in the configuration are taken in their order; one is shared only if asked for."""
    assert chosen(8, trainers=2, rollouts=2, trainer=[5, 4], rollout=[0, 1, 2]) == [[5], [4], [0], [0], [1]]
    assert chosen(4, trainers=2, rollouts=1, size=2, trainer=[3, 1]) == [[3], [1], [0], [0, 2]]
    assert chosen(2, trainer=[1], rollout=[1]) == [[1], [1], [1]]  # shared because it was asked for
    config = RunConfig()
    config.trainer.devices = [9]  # of other machines' trainers
    assert devices_of(
        config, [RoleOfRank("rollout", 4), RoleOfRank("rollout", 5)], RoleOfRank("rollout", 5), 2
    ) == [1]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (r"trainer.devices=\[0\]: this machine has no GPU; leave it at null", {"count": 0, "trainer": [0]}),
        (r"rollout.devices=\[0, 4\]: this machine has 4 GPUs, 0 to 3", {"count": 4, "rollout": [0, 4]}),
        (
            r"rollout.devices=\[1, 2\]: 4 GPUs are needed on this machine",
            {"count": 4, "rollouts": 2, "size": 2, "rollout": [1, 2]},
        ),
        (
            r"trainer.devices=\[1\]: 2 GPUs are needed on this machine",
            {"count": 4, "trainers": 2, "trainer": [1]},
        ),
        (r"3 trainer ranks on a machine with 2 GPUs", {"count": 2, "trainers": 3}),
        (r"rollout.tensor_parallel=4: this machine has 2 GPUs", {"count": 2, "size": 4}),
    ],
)
def test_what_does_not_fit_is_refused(text, arguments):
    """Too few devices, or a wrong list, are refused in one line."""
    with pytest.raises(LaminarError, match=text) as error:
        chosen(**arguments)
    assert "\n" not in str(error.value)


def test_what_is_present(monkeypatch):
    """CUDA_VISIBLE_DEVICES counts, as for CUDA itself; a rank's own are named as it names them."""
    for value, names in (
        ("", []),
        ("-1", []),
        ("3, 5", ["3", "5"]),
        ("0,-1,1", ["0"]),  # CUDA stops there
        ("GPU-1a", ["GPU-1a"]),
        ("MIG-7c,MIG-8d", ["MIG-7c", "MIG-8d"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert present() == names
    code = """
import os
from laminar_hpc.machine.devices import use_devices
from laminar_hpc.machine.roles import assign_roles
from laminar_hpc.config.schema import RunConfig
here = assign_roles(1, 2, 1, 5)
use_devices(RunConfig(), here, here[-1])
print(os.environ["CUDA_VISIBLE_DEVICES"])
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "3,GPU-1a,7"}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout
        == "7\n"
    )


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["null", "nvidiactl", "nvidia-uvm", "nvidia-modeset"], []),
        (["nvidiactl", "nvidia0", "nvidia1"], ["0", "1"]),
        (["nvidiactl", "nvidia5"], ["0"]),  # a container that was given one of eight
        (["nvidia3", "nvidia7", "nvidia10"], ["0", "1", "2"]),
    ],
)
def test_gpus_are_named_as_cuda_numbers_them(tmp_path, monkeypatch, files, names):
    """Promise: the driver's numbers in /dev are not CUDA's: those go from 0, whatever a container holds."""
    for file in files:
        (tmp_path / file).touch()
    monkeypatch.setattr(devices, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert present() == names


def test_wsl_has_no_file_for_a_gpu(tmp_path, monkeypatch):
    """Promise: under WSL2, where the driver's files are not, GPUs are those that nvidia-smi lists; a trainer
    would take the GPU, and an engine the CPU."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\n[ $1 = -L ] && echo 'GPU 0: RTX (UUID: GPU-1a)' && echo 'GPU 1: RTX (UUID: GPU-2b)'\n"
    )
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", str(tool.parent))
    monkeypatch.setattr(devices, "DEVICES", tmp_path)
    monkeypatch.setattr(devices, "_SMI_OF_WSL", str(tmp_path / "none"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for has_dxg, has_tool, names in ((False, True, []), (True, True, ["0", "1"]), (True, False, [])):
        devices._listed_by_smi.cache_clear()
        if has_dxg:
            (tmp_path / "dxg").touch()
        if not has_tool:
            tool.unlink()
        assert present() == names
    devices._listed_by_smi.cache_clear()


def test_the_training_has_hardware_queues(monkeypatch, caplog):
    """Promise: an inherited CUDA_DEVICE_MAX_CONNECTIONS=1, which recipes for Megatron export, does not put
    the training behind publications; trainer 0 says so, and a larger one stays."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    here = assign_roles(1, 1, 1, 4)
    roles = {rank.role: rank for rank in here}
    for given, role, taken in (
        ("1", "trainer", "32"),
        ("1", "relay", "32"),
        ("1", "rollout", "1"),  # SGLang sets its own
        ("", "trainer", "32"),
        ("16", "trainer", "16"),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
        monkeypatch.setenv(devices.QUEUES, given)
        use_devices(RunConfig(), here, roles[role])
        assert os.environ[devices.QUEUES] == taken
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 is not used: 32")


def test_a_run_for_gpus_is_refused_without_any(monkeypatch):
    """Promise: a configuration that names the memory of its GPUs does not train on the CPU in silence."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    here = assign_roles(1, 1, 1, 4)
    config = RunConfig()
    use_devices(config, here, here[0])
    config.rollout.gpu_memory_gigabytes = 80
    with pytest.raises(LaminarError, match=r"^rollout.gpu_memory_gigabytes=80: this machine shows no GPU .*"):
        use_devices(config, here, here[3])
    config.rollout.engine = "emulated"
    use_devices(config, here, here[3])
    config.role, config.trainer.gpu_memory_gigabytes = "relay", 80  # a relay needs none
    use_devices(config, here, here[2])


def test_gpus_that_torch_cannot_use_are_refused(monkeypatch):
    """Promise: a rank that was given GPUs and has a torch without CUDA, an old driver or too few of them ends
    with one line instead of going on slowly."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    world.refuse_unusable_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(LaminarError, match=r"torch .* is a build without CUDA: make setup CUDA=13[^\n]*$"):
        world.refuse_unusable_gpus()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LaminarError, match=r"CUDA finds 1 of the GPUs CUDA_VISIBLE_DEVICES=0,1: [^\n]*$"):
        world.refuse_unusable_gpus()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    world.refuse_unusable_gpus()


def test_replicas_apart_take_the_last_gpus():
    """Promise: they don't meet the trainers, which take the first ones in theirs."""
    config, here = RunConfig(role="rollout"), [RoleOfRank("rollout", index) for index in (4, 5)]
    config.rollout.tensor_parallel = 2
    assert [devices_of(config, here, mine, 8) for mine in here] == [[4, 5], [6, 7]]
    assert [devices_of(config, here, mine, 3) for mine in here] == [[0, 1], [2, 0]]


def test_slices_of_a_gpu_pass_no_weights_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: NCCL takes all MIG slices of a GPU for one device: relay.transport=nccl is refused at the
    start in one line, auto goes through host memory, also between machines."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aaaa,MIG-bbbb")
    config, here = RunConfig(), assign_roles(1, 1, 1, 4)
    config.relay.transport = "nccl"
    for rank in here:
        if rank.role in ("trainer", "relay"):
            with pytest.raises(LaminarError, match=f"nccl: {rank.role} 0 uses MIG-.*relay.transport=auto"):
                use_devices(config, here, rank)
    config.relay.transport = "auto"
    use_devices(config, here, here[-1])
    slices, other = end_here("GPU-of-all-slices"), LinkEndpoint("another boot", "GPU-b")
    assert choose("auto", slices, other, "relay 1") == choose("auto", other, slices, "relay 1") == "host"
