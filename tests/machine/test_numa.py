"""CPUs next to a GPU, by what Linux and NVIDIA's driver say in files."""

import os
import threading

import pytest

from laminar_hpc.machine import numa


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of two GPUs; returns how to say which CPUs lie next to the second one."""
    for name, uuid in (("0000:17:00.0", "GPU-1a-2b"), ("0000:CA:00.0", "GPU-3c-4d")):
        (tmp_path / "gpus" / name).mkdir(parents=True)
        (tmp_path / "gpus" / name / "information").write_text(f"Model: \t H100\nGPU UUID: \t {uuid}\n")
        (tmp_path / "pci" / name.lower()).mkdir(parents=True)
        (tmp_path / "pci" / name.lower() / "local_cpulist").write_text("0-1023\n")
    monkeypatch.setattr(numa, "GPUS", tmp_path / "gpus")
    monkeypatch.setattr(numa, "PCI", tmp_path / "pci")
    return (tmp_path / "pci" / "0000:ca:00.0" / "local_cpulist").write_text


def stays(uuid: str) -> set[int]:
    """The CPUs of a thread, as only the thread that asks is bound."""
    found: list[set[int]] = []

    def run() -> None:
        numa.stay_near(uuid)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_list_of_cpus(machine):
    """Promise: the kernel's ranges are read, for the GPU that is meant, with either form of its name."""
    machine("0-3,8,10-11\n")
    assert numa.cpus_near("3c-4d") == numa.cpus_near("GPU-3c-4d") == {0, 1, 2, 3, 8, 10, 11}
    assert numa.cpus_near("3c") == numa.cpus_near("MIG-3c-4d") == set()


def test_a_process_stays_near_its_gpu(machine):
    """Promise: it keeps to those of its CPUs that lie there, and to all of them where none does, or where
    nothing is known."""
    mine = os.sched_getaffinity(0)
    machine(f"{min(mine)}\n")
    assert stays("3c-4d") == {min(mine)} and os.sched_getaffinity(0) == mine
    for said in (f"{max(mine) + 1}\n", "\n", "no list\n"):
        machine(said)
        assert stays("3c-4d") == mine
    assert stays("5e-6f") == mine
