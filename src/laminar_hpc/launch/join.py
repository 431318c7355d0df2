"""`laminar join [HOST:PORT] --key FILE`: adds rollouts on this machine to a run, which it reaches at that
address, by default the key's, and with which it shares no file. `--key -`: by `laminar launch`, which hands
the key over on the standard input (launch/ssh/joining.py).

    the run's bulk door --configuration, address, model--> a folder here --> relay and rollouts as ever

The folder (run_dir=) takes the place of the run directory: logs, traces and engine files stay in it. Keys and
address in it are removed at the end; while the run goes on, its rollouts keep the address up to date. What is
a path on other machines in the run's configuration can be another one here, by key=value words.
"""

import dataclasses
import secrets
import shutil
import socket
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path

from laminar_hpc import __version__
from laminar_hpc.config.errors import LaminarError, Refused, print_lines, said
from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.system_schema import RANKS_MAX
from laminar_hpc.config.yaml_text import load_yaml
from laminar_hpc.launch.launch import NodeAgent, WorkerGroup
from laminar_hpc.launch.launch_role import PER_HOUR, RoleGroup
from laminar_hpc.launch.machine_relays import MachineRelays
from laminar_hpc.launch.ranks import Ranks
from laminar_hpc.launch.ssh.host import HostOutput
from laminar_hpc.launch.ssh.joining import JoinInput
from laminar_hpc.line.address import ADDRESS_FILE
from laminar_hpc.line.agent_line import REFUSED
from laminar_hpc.line.bulk_client import BulkClient
from laminar_hpc.line.join_key import (
    JOINED_FILE,
    JoinKey,
    follow_controller,
    forget_keys,
    read_join_key,
    write_join_key,
)
from laminar_hpc.line.messages.bulk import AskController, AskToJoin, JoinGranted, ReadBytes
from laminar_hpc.machine.files.folders import slots_root
from laminar_hpc.machine.locks.holder import is_held
from laminar_hpc.machine.observability import console, output
from laminar_hpc.machine.processes import machine_name, on_stop_signals
from laminar_hpc.policies.restarts import Restarts

_ASK_SECONDS = 60.0
_LOST_SECONDS = 10.0
_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.1
_END_SECONDS = 1.0  # within which the processes of a join that was killed have ended
_AGAIN_SECONDS = 20.0  # within which a relay that has died is there again
_READ_BYTES = 4 << 20
# settings, or sections of them, that a machine may have of its own; all others are the run's
_OWN = ("run_dir", "model.path", "model.lora.path", "reward.workers", "reward.slots", "environment.python")
_OWN_SECTIONS = ("rollout", "relay", "cluster", "observability")
_JOINING = ("cluster.host", "cluster.port", "cluster.storage", "cluster.join_port", "relay.lanes")


class JoinedGroup(RoleGroup):
    """Relays or a rollout of a run whose folder is not here."""

    def may_go_on(self) -> bool:
        """Whether the run still answers: they have waited for its controller before they ended."""
        key = read_join_key(self.run_dir / JOINED_FILE)
        with closing(BulkClient(key, _LOST_SECONDS)) as client:
            try:
                return bool(client.ask(AskController()))
            except LaminarError as error:
                print(console.line("left", f"{self.role}: {error}"), flush=True)
                return False


def main(options: Namespace) -> int:
    """Exit code: 0 = the run is over, or they have left; 1 = failed. Raises LaminarError."""
    words, place = list(options.words), ""
    output.guard()
    if words and not words[0].startswith("-") and "=" not in words[0]:
        place = words.pop(0)
    if wrong := [word for word in words if word.startswith("-")]:
        raise LaminarError(f"laminar join: {wrong[0]}: no such option")
    if not options.key:
        raise LaminarError("laminar join needs --key FILE, a copy of the run's RUN_DIR/join.key")
    replicas = _count(options.replicas)
    if options.key != "-":
        return _join(_at(read_join_key(Path(options.key)), place), words, replicas)
    try:
        orders = JoinInput(options.tied)
        return _join(_at(orders.key(), place), words, replicas, orders)
    except KeyboardInterrupt:
        print(console.line("left", "before it had joined the run"), flush=True)
        return 0


def _join(key: JoinKey, words: Sequence[str], replicas: int, orders: JoinInput | None = None) -> int:
    with closing(BulkClient(key, _ASK_SECONDS)) as client:
        granted = _granted(client)
        folder = _folder(granted, words)
        try:
            settings = prepare(folder, key, granted, words, client)
        except BaseException:
            shutil.rmtree(folder)
            raise
    if orders is not None:
        orders.begin()
    with closing(HostOutput(folder)) if orders else nullcontext():
        try:
            return _run(folder, *_groups(folder, granted, settings, replicas), orders)
        except LaminarError as error:
            print_lines(error)  # while somebody reads it
            return REFUSED
        finally:
            _leave(folder)


def _granted(client: BulkClient) -> JoinGranted:
    """Waits for the run's trainers: by then the machines of its own relays are known."""
    told, since = False, time.monotonic()
    while True:
        granted, _ = client.ask(AskToJoin(__version__))
        assert isinstance(granted, JoinGranted)
        limit = load_yaml(granted.config)["cluster"]["join_timeout_seconds"]
        if granted.relays is not None:
            return granted
        if time.monotonic() - since > limit:
            raise LaminarError(f"the run's trainers have not joined it within {limit:.0f} s: join later")
        if not told:
            print(console.line("waits", "for the run's trainers"), flush=True)
            told = True
        time.sleep(_LOOK_SECONDS)


def prepare(
    folder: Path, key: JoinKey, granted: JoinGranted, words: Sequence[str], client: BulkClient
) -> list[str]:
    """Puts into `folder` what ranks need; the words by which they compose their configuration. Raises Refused
    where something must be there that is not."""
    write_join_key(folder / JOINED_FILE, key)
    follow_controller(folder, granted.address, key.host)
    own = folder / "conf" / "experiment" / "joined.yaml"
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(as_experiment(granted.config))
    model = granted.model or _model(folder, granted, words, client)
    settings = [
        f"--config-dir={folder / 'conf'}",
        "experiment=joined",
        f"model.path={model}",
        *words,
        f"run_dir={folder}",
        f"cluster.host={key.host}",
    ]
    _check(load_config([*settings, "role=rollout"]))
    return settings


def as_experiment(config: str) -> str:
    """A run's configuration as a file for `experiment=`."""
    return f"# @package _global_\n{config}"


def _check(config: RunConfig) -> None:
    """Raises Refused with a line for each thing that this machine lacks."""
    from laminar_hpc.controller.trajectories.rewards import check_rewards
    from laminar_hpc.data.pretrained import download_model, resolve_model
    from laminar_hpc.machine.devices import check_present

    config = resolve_model(config, print)
    lines = [*said(check_present, config), *said(check_rewards, dataclasses.replace(config, dry_run=True))]
    if not lines:
        download_model(config, print)
    if not (Path(config.model.path) / "config.json").is_file():
        lines.append(f"model.path={config.model.path}: there is no model; name its folder on this machine")
    if lines:
        raise Refused(f"on this machine: {line}" for line in lines)


def _model(folder: Path, granted: JoinGranted, words: Sequence[str], client: BulkClient) -> Path:
    """The model's folder on this machine: as the words say, where the run has it, or fetched."""
    given = [word.partition("=")[2] for word in words if word.startswith("model.path=")]
    there = Path(given[-1]) if given else Path(load_yaml(granted.config)["model"]["path"])
    sizes = granted.model_files
    if given or _is_here(there, sizes):
        return there
    model = folder / "model"
    print(console.line("model", f"fetching {console.size(sum(sizes.values()))} of {there}"), flush=True)
    for name, size in sizes.items():
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        with open(model / name, "wb") as file:
            while (at := file.tell()) < size:
                _, body = client.ask(ReadBytes(name, at, min(_READ_BYTES, size - at), model=True))
                if not body:
                    raise LaminarError(f"{there / name} of the run has become shorter: join again")
                file.write(body)
    return model


def _is_here(folder: Path, sizes: dict[str, int]) -> bool:
    files = {folder / name: size for name, size in sizes.items()}
    return all(file.is_file() and file.stat().st_size == size for file, size in files.items())


def _groups(
    folder: Path, granted: JoinGranted, settings: Sequence[str], replicas: int
) -> tuple[list[WorkerGroup], MachineRelays | None]:
    """Rollouts, with relays where none of the run is on this machine; those that are started here once the
    join that has them here has ended, None where the run's own are here."""
    config = load_config([*settings, "role=rollout"])
    found, lanes = list[WorkerGroup](), max(1, config.relay.lanes)
    advice = f"; see {folder / 'logs'}"
    shm_dir = config.relay.shm_dir

    def start() -> list[WorkerGroup]:
        words = [*settings, "role=relay", f"first_index={granted.machine * lanes}"]
        ranks = Ranks(range(lanes), lanes)
        return [JoinedGroup(load_config(words), words, ranks, Restarts(PER_HOUR), advice=advice)]

    relays = MachineRelays(granted.slots, shm_dir, start)
    has_own = not relays.are_another_jobs() and _is_served(granted, shm_dir)
    if not has_own:
        settings = [*_place(config, granted), *settings]
        found += relays.look()
    words = [*settings, "role=rollout"]
    for number in range(replicas):
        ranks = Ranks([number], replicas)
        found.append(JoinedGroup(config, words, ranks, Restarts(PER_HOUR), advice=advice))
    return found, None if has_own else relays


def _is_served(granted: JoinGranted, shm_dir: str) -> bool:
    """A living relay of the run writes the slots of this machine. One of which there are only traces may have
    been killed a moment ago, and may start again; that of a join which was killed ends a moment later."""
    root = slots_root(shm_dir, granted.slots)

    def is_written() -> bool:
        return any(map(is_held, root.glob("writer*")))

    traces = machine_name(shm_dir) in (granted.relays or ()) or root.exists()
    until = time.monotonic() + (_AGAIN_SECONDS if traces else 0.0)
    while not (served := is_written()) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    if served:
        time.sleep(_END_SECONDS)
    return served and is_written()


def _place(config: RunConfig, granted: JoinGranted) -> list[str]:
    """Weights come encrypted, over connections of this machine's, where a relay of the run is there."""
    elsewhere = set(granted.relays or ()) - {machine_name(config.relay.shm_dir)}
    encrypted = elsewhere and config.relay.lanes == 1 and not config.cluster.place
    return [f"cluster.place={socket.gethostname()}"] if encrypted else []


def _run(
    folder: Path, groups: list[WorkerGroup], relays: MachineRelays | None, orders: JoinInput | None
) -> int:
    roles = ", ".join(group.role for group in groups)
    print(console.line("joined", f"{roles}; logs in {folder / 'logs'}"), flush=True)
    agent, look_at = NodeAgent(folder, groups), 0.0

    def look() -> None:
        nonlocal look_at
        if orders is not None:
            orders.obey(agent)
        if relays is not None and time.monotonic() > look_at and not any(each.is_told for each in groups):
            look_at = time.monotonic() + _LOOK_SECONDS
            groups.extend(relays.look())

    if orders is None:
        on_stop_signals(agent.on_signal)
    with closing(relays) if relays is not None else nullcontext():
        return agent.run(look)


def _leave(folder: Path) -> None:
    """Keys, address and model are removed; logs and traces stay."""
    forget_keys(folder)
    (folder / ADDRESS_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder / "model", ignore_errors=True)


def _folder(granted: JoinGranted, words: Sequence[str]) -> Path:
    """Made for this machine's part, for its user alone. Raises Refused for a setting that is the run's."""
    for word in words:
        name = word.partition("=")[0].lstrip("~")
        if name in _JOINING or (name not in _OWN and name.partition(".")[0] not in _OWN_SECTIONS):
            raise Refused([f"{word}: that is the run's to say; leave it out"])
    given = [word.partition("=")[2] for word in words if word.startswith("run_dir=")]
    run = Path(load_yaml(granted.config)["run_dir"]).name
    folder = Path(given[-1] if given else f"runs/joined-{run}-{secrets.token_hex(2)}").absolute()
    try:
        folder.mkdir(mode=0o700, parents=True)
        (folder / "logs").mkdir()
    except OSError as error:
        raise Refused([f"run_dir={folder} cannot be made ({error.strerror}): name a new folder"]) from None
    return folder


def _at(key: JoinKey, place: str) -> JoinKey:
    """The key with the address where this machine reaches the run; that of the key where none is given."""
    host, colon, port = (place or key.place).rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise LaminarError(f"{place}: write HOST:PORT, as the run's line `join` has it")
    key.host = host
    key.port = int(port)
    return key


def _count(given: str) -> int:
    if not given.isdecimal() or not 0 < int(given) <= RANKS_MAX:
        raise LaminarError(f"--replicas={given}: write a number from 1 on")
    return int(given)
