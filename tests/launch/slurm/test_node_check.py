"""`laminar slurm check`: how what the nodes saw becomes rows with a verdict and a cure. The probe itself runs
in tests/slurm/test_slurm_check.py."""

import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.launch import cli
from laminar_hpc.launch.slurm.check import rows
from laminar_hpc.launch.slurm.network import INTERFACE, addresses, await_own_address, own_address
from laminar_hpc.launch.slurm.probe import Seen, ask_clock, serve_clock, storage


def node(number: int, **changes: object) -> Seen:
    seen = Seen(
        number,
        host=f"n{number}",
        address=f"10.0.0.{number}",
        interface="ib0",
        versions={"torch": "2.13.0", "python": "3.11.7"},
        gpus=["H100"] * 8,
        nofile=1 << 20,
        memlock=-1,
        shm_bytes=1 << 38,
        round_trip_seconds=1e-4,
        file_system="lustre",
        sync_seconds=0.004,
        broadcast_bytes_per_second=5e9,
    )
    for name, value in changes.items():
        setattr(seen, name, value)
    return seen


def verdicts(nodes: int, *seen: Seen) -> dict[str, tuple[str, str]]:
    """By row, its level and the whole line."""
    return {each.what: (each.verdict.level, str(each)) for each in rows(nodes, seen, "srun: n2 is down")}


def test_equal_healthy_nodes_are_ok_in_every_row() -> None:
    """Promise: one row for each thing, and nothing to be done."""
    found = verdicts(3, *(node(number) for number in range(3)))
    assert {level for level, _ in found.values()} == {"ok"} and len(found) == 11
    assert "5.00 GB/s" in found["gloo broadcast"][1] and "8 x H100 (3 nodes)" in found["GPUs"][1]


@pytest.mark.parametrize(
    ("row", "level", "changes", "text"),
    [
        ("rendezvous", "FAIL", {"wrong": {"network": "no route"}}, "no route on n1  (name the interface"),
        ("interface", "warn", {"interface": "eth0"}, "eth0 (1 nodes)"),
        ("clocks", "warn", {"clock_seconds": -3.5}, "3500.0 ms apart at most on n1  (let NTP"),
        ("open files", "warn", {"nofile": 1024}, "1,024 on n1  (raise nofile"),
        ("locked memory", "warn", {"memlock": 8 << 20}, "8 MiB on n1  (raise memlock"),
        ("/dev/shm", "warn", {"shm_bytes": 64 << 20}, "64 MiB free at least on n1"),
        (
            "versions",
            "FAIL",
            {"versions": {"torch": "2.12.0", "python": "3.11.7"}},
            "2.12.0, elsewhere 2.13.0 on n1",
        ),
        ("GPUs", "warn", {"gpus": ["H100"] * 7}, "7 x H100 (1 nodes)"),
        (
            "shared storage",
            "FAIL",
            {"storage": {"rename over a file": "refused"}},
            "rename over a file: refused on n1",
        ),
        ("shared storage", "warn", {"sync_seconds": 0.4}, "a sync in 400.0 ms at most on n1"),
        ("gloo broadcast", "FAIL", {"wrong": {"broadcast": "timed out"}}, "timed out on n1  (see rendezvous"),
        ("gloo broadcast", "warn", {"broadcast_bytes_per_second": 1e7}, "at 0.01 GB/s"),
    ],
)
def test_a_node_that_differs_is_named_with_a_cure(row: str, level: str, changes: dict, text: str) -> None:
    """Promise: the row says which node, what is wrong there, and what to do; all other rows stay as they
    are."""
    found = verdicts(2, node(0), node(1, **changes))
    assert found[row][0] == level and text in found[row][1] and found[row][1].endswith(")")
    others = {name: each for name, (each, _) in found.items() if name != row}
    assert set(others.values()) <= {"ok"}


def test_a_node_that_does_not_answer_is_counted() -> None:
    """Promise: what srun has said stands in the row."""
    level, text = verdicts(3, node(0), node(1))["nodes"]
    assert level == "FAIL" and "1 of 3 did not answer: [2]" in text and "n2 is down" in text


def test_clocks_are_compared_over_a_connection(tmp_path: Path) -> None:
    """Promise: one machine's clock does not differ from its own, and each question is answered."""
    serve_clock(tmp_path, "127.0.0.1")
    host, port = (tmp_path / "head").read_text().split()
    results = []
    threads = [threading.Thread(target=lambda: results.append(ask_clock(host, int(port)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 4
    for trip, skew in results:
        assert trip > 0 and abs(skew) <= trip


def test_this_file_system_has_what_a_run_needs(tmp_path: Path) -> None:
    """Promise: creation, rename and sync are really tried."""
    seen = Seen(0)
    storage(seen, tmp_path)
    assert seen.storage == {} and seen.sync_seconds > 0 and seen.file_system
    with pytest.raises(OSError):
        storage(Seen(0), tmp_path / "absent")


def test_the_interface_is_the_user_s_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: an interface that is not there is refused with those that are; else the node's own name
    decides, and never loopback."""
    monkeypatch.setenv(INTERFACE, "nosuch0")
    with pytest.raises(LaminarError, match=r"LAMINAR_INTERFACE=nosuch0: .* slurm/site.sh"):
        own_address()
    monkeypatch.delenv(INTERFACE)
    if not addresses():
        with pytest.raises(LaminarError, match="no network but loopback"):
            own_address()
        return
    assert own_address() in addresses().values()
    name, address = next(iter(addresses().items()))
    monkeypatch.setenv(INTERFACE, name)
    assert own_address() == addresses()[name] and socket.inet_aton(address)


def test_a_network_that_is_down_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a job that starts while a cable is out goes on when it is back; one without any network is
    refused at once."""
    monkeypatch.delenv(INTERFACE, raising=False)
    looks: list[bool] = []

    def stats() -> dict[str, SimpleNamespace]:
        looks.append(len(looks) >= 3)
        return {"lo": SimpleNamespace(isup=True), "eth9": SimpleNamespace(isup=looks[-1])}

    entry = SimpleNamespace(family=socket.AF_INET, address="192.0.2.7")
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth9": [entry]})
    monkeypatch.setattr("psutil.net_if_stats", stats)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    assert await_own_address(60) == "192.0.2.7" and len(looks) == 4
    looks.clear()
    with pytest.raises(LaminarError, match="no network but loopback: ip link; it did not come up within"):
        await_own_address(-1)
    monkeypatch.setattr("socket.gethostbyname", lambda name: "192.0.2.7")
    looks.clear()
    with pytest.raises(LaminarError, match=r"192\.0\.2\.7 is down: ip link; it did not come up"):
        await_own_address(-1)
    monkeypatch.setattr("psutil.net_if_addrs", dict)
    with pytest.raises(LaminarError, match=r"no network but loopback: ip link$"):
        await_own_address(60)


def test_outside_an_allocation_it_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: one line with the command to type."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(LaminarError, match="salloc --nodes=2 laminar slurm check"):
        cli.run(["slurm", "check"])
    with pytest.raises(LaminarError, match="usage: laminar slurm check"):
        cli.run(["slurm", "chek"])
    assert os.environ.get("SLURM_JOB_ID") is None
