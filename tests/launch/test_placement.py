"""Every file of conf/experiment has a place for each rank on the nodes that it names, by every documented way
of starting it. No GPU is needed."""

import re
from collections import Counter

import pytest

from laminar_hpc.config.check import Derived, derive
from laminar_hpc.config.directories import conf_directory
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import group_names, load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch.placement import place
from laminar_hpc.machine.devices import devices_of, gpus_per_node
from laminar_hpc.machine.roles import Gpus, RoleOfRank, assign_roles

FOLDER = conf_directory() / "experiment"
EXPERIMENTS = group_names(FOLDER)


def gpus_of(name: str) -> int:
    """Of each node, as the file's first lines say."""
    header = "".join(line for line in (FOLDER / f"{name}.yaml").open() if line.startswith("#"))
    found = re.search(r"of (\d+) GPUs|(one) GPU|(CPU cores)", header)
    assert found, f"{name}.yaml does not say for what machines it is"
    return int(found[1]) if found[1] else 1 if found[2] else 0


def loaded(name: str) -> tuple[RunConfig, Derived]:
    config = load_config([f"experiment={name}", "dry_run=true"])
    return config, derive(config)


def check_node(config: RunConfig, here: list[RoleOfRank], gpus: int, shared: bool) -> Counter[str]:
    """Each rank has the GPUs it needs, which no other uses unless they are shared. Returns how many ranks
    the node has of each role."""
    used: Counter[int] = Counter()
    for mine in here:
        found = devices_of(config, here, mine, gpus)
        if mine.role in ("trainer", "rollout") and gpus:
            assert len(found) == (1 if mine.role == "trainer" else config.rollout.tensor_parallel)
            used.update(found)
    assert shared or not used or max(used.values()) == 1, used
    return Counter(rank.role for rank in here)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_in_one_world_over_the_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: `laminar train` on one node, and slurm/laminar_single.sbatch as the file's header calls it."""
    config, derived = loaded(name)
    gpus = gpus_of(name)
    said = re.search(r"NPROC_PER_NODE=(\d+) sbatch --nodes=(\d+)", (FOLDER / f"{name}.yaml").read_text())
    ranks, nodes = (int(said[1]), int(said[2])) if said else (derived.world_size, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("WORLD_SIZE", str(nodes * ranks))
    found: Counter[str] = Counter()
    for node in range(nodes):
        monkeypatch.setenv("RANK", str(node * ranks))
        _, here, relays = place(config)
        kinds = check_node(config, here, gpus, shared=gpus == 1)
        assert bool(kinds["relay"]) == bool(kinds["rollout"]) and kinds["relay"] in (0, config.relay.lanes)
        assert kinds["controller"] == (node == 0)  # whose address the others are given
        groups = Counter(r.index // config.trainer.tensor_parallel for r in here if r.role == "trainer")
        assert set(groups.values()) <= {config.trainer.tensor_parallel}  # over NVLink
        found += kinds
    assert (found["trainer"], found["rollout"]) == (derived.trainer_ranks, derived.rollout_ranks)
    assert found["relay"] == relays and nodes * gpus in (0, 1, derived.gpus_unless_shared)


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if gpus_of(name) > 1])  # one GPU is shared
def test_with_roles_apart(name: str) -> None:
    """Promise: launch/*.sh on as many nodes: trainers fill nodes from their first GPU on, replicas have the
    last ones, and where one node has both they don't meet."""
    config, derived = loaded(name)
    gpus = gpus_of(name)
    trainers = min(gpus, derived.trainer_ranks)
    replicas = min((gpus if trainers == gpus else gpus - trainers) // config.rollout.tensor_parallel, 8)
    used: Counter[int] = Counter()
    for role, ranks in (("trainer", trainers), ("rollout", replicas)):
        config.role = role
        here = [RoleOfRank(role, index) for index in range(ranks)]
        check_node(config, here, gpus, shared=False)
        used.update(device for mine in here for device in devices_of(config, here, mine, gpus))
    nodes = derived.trainer_ranks // trainers, derived.rollout_ranks // replicas
    assert nodes[0] * trainers == derived.trainer_ranks and nodes[1] * replicas == derived.rollout_ranks
    if nodes == (1, 1):
        assert max(used.values()) == 1, used


def test_gpus_decide_on_several_nodes() -> None:
    """Promise: whole tensor-parallel groups, engines where GPUs are left, spare ranks at the end of a node;
    where GPUs are too few for that they are shared, by the number of ranks alone."""

    def names(*layout: int, gpus: Gpus) -> str:
        return " ".join(f"{rank.role[:2]}{rank.index}" for rank in assign_roles(*layout, gpus=gpus))

    assert names(2, 1, 2, 3, gpus=Gpus(2, 2, 2)) == "tr0 tr1 co0 re0 ro0 sp0"
    assert names(1, 1, 2, 4, gpus=Gpus(2)) == "tr0 co0 re0 ro0 sp0 sp1 sp2 sp3"
    assert names(1, 1, 2, 2, gpus=Gpus(1)) == "tr0 co0 re0 ro0"
    assert names(1, 1, 1, 4, gpus=Gpus(1)) == "tr0 co0 re0 ro0"
    with pytest.raises(LaminarError, match=r"does not fit 4 trainer .* start 4 ranks per node"):
        assign_roles(4, 2, 2, 3, gpus=Gpus(4, 4, 2))


def test_all_nodes_count_the_same_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a node that shows fewer GPUs than the job's first one is refused in one line: it would place
    the roles in another way than the others."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv("LAMINAR_GPUS_PER_NODE", "4")
    with pytest.raises(
        LaminarError, match=r"this machine shows 3 GPUs and the first one of the job 4: [^\n]*$"
    ):
        gpus_per_node(RunConfig())
    monkeypatch.setenv("LAMINAR_GPUS_PER_NODE", "3")
    assert gpus_per_node(RunConfig()) == Gpus(3, 1, 1)


def test_one_world_takes_no_notice_of_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a replica cannot leave a world of all roles, so who wants it to is told how to start them
    apart."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    words = ["experiment=demo", "cluster.preemption_notice=/notice"]
    with pytest.raises(LaminarError, match=r"cluster.preemption_notice=/notice: in one world [^\n]*apart"):
        place(load_config(words))
    assert place(load_config([*words, "role=rollout"]))[0].role == "rollout"


@pytest.mark.parametrize(
    ("here", "first", "cure"),
    [
        ("1", 0, r"all 2 .* together, with LANES=2 launch/relay.sh"),
        ("2", 3, r"first_index=3: .* use 2 x n on the n-th machine"),
    ],
)
def test_the_relays_of_a_machine_come_together(
    monkeypatch: pytest.MonkeyPatch, here: str, first: int, cure: str
) -> None:
    """Promise: each of them fills its own part of a slot, so other numbers are refused with those that do."""
    for name, value in {"RANK": "0", "WORLD_SIZE": here, "LOCAL_WORLD_SIZE": here}.items():
        monkeypatch.setenv(name, value)
    words = ["role=relay", "relay.lanes=2", f"first_index={first}"]
    with pytest.raises(LaminarError, match=cure):
        place(load_config(["experiment=demo", *words]))


def test_a_relay_of_another_place_says_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: 0, the default, would be the number of the relay where the trainer is; one of the two would be
    refused, whichever came last."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    words = ["experiment=demo", "role=relay", "cluster.place=paris"]
    with pytest.raises(LaminarError, match=r"first_index=0: .* cluster.place=paris set first_index=1"):
        place(load_config(words))
    assert place(load_config([*words, "first_index=1"]))[0].index == 1
    assert place(load_config(words[:2]))[0].index == 0
