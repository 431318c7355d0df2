"""From `model.path` to a folder on this machine: the door of the room; imports no hub library."""

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import yaml

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import is_known
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.yaml_text import load_yaml
from laminar_hpc.data.pretrained import hub
from laminar_hpc.data.pretrained.names import HubName, parse_name, recorded_name
from laminar_hpc.machine.observability.console import line, size

Say = Callable[[str], None]


def resolve_model(config: RunConfig, say: Say) -> RunConfig:
    """The configuration with `model.path` as a folder with at least config.json; itself where that is a path.

    A dry run of a model whose numbers are known (config.models) asks nobody. Raises LaminarError in one line.
    """
    name = parse_name(config.model.path)
    if name is None:
        return config
    if config.dry_run and is_known(str(name)):
        return config
    name = _of_the_run(config, name)
    commit = hub.commit_of(name, say)
    _refuse_another(config, name, commit)
    pinned = HubName(name.repo, commit)
    folder = hub.config_of(pinned)
    if config.dry_run and (left := hub.size_left(pinned, folder)):
        say(line("model", f"{name}: a run would download {size(left)}"))
    return at(config, folder)


def download_model(config: RunConfig, say: Say | None) -> None:
    """Fetches what a run needs of a folder that `resolve_model` chose. Raises LaminarError in one line."""
    name = recorded_name(config.model.path)
    if name is not None and _in_cache(config.model.path):
        hub.download(name, Path(config.model.path), say)


def prepare_rank(config: RunConfig, say: Say, print_error: Say) -> RunConfig:
    """Both, on a rank; the first rank of each machine speaks. Raises LaminarError on all of its ranks."""
    first, head = os.environ.get("LOCAL_RANK", "0") == "0", os.environ.get("RANK", "0") == "0"
    try:
        resolved = resolve_model(config, say if first else _silent)
        if not config.dry_run and resolved is not config:
            download_model(resolved, say if first else None)
        return resolved
    except LaminarError as error:
        # the first rank of all says it by itself; another machine may have trouble of its own
        if first and not head:
            print_error(f"on {socket.gethostname()}: {error}")
        raise


def follow(config: RunConfig, controllers: str) -> RunConfig:
    """The configuration with the controller's commit (as `recorded_name` writes it): a branch may have moved
    since it looked, or this machine's cache may hold an older one. Raises LaminarError."""
    mine = recorded_name(config.model.path)
    if mine is None or not controllers or str(mine) == controllers:
        return config
    repo, _, commit = controllers.partition("@")
    folder = hub.config_of(HubName(repo, commit))
    hub.download(HubName(repo, commit), folder, None)
    return at(config, folder)


def at(config: RunConfig, folder: Path) -> RunConfig:
    """The same configuration with the model in `folder`."""
    return replace(config, model=replace(config.model, path=str(folder)))


def _of_the_run(config: RunConfig, name: HubName) -> HubName:
    """With resume=auto the commit that the run began with, where no revision was named."""
    begun = _begun_with(config)
    return begun if begun is not None and begun.repo == name.repo and not name.revision else name


def _refuse_another(config: RunConfig, name: HubName, commit: str) -> None:
    begun = _begun_with(config)
    if begun is not None and begun.repo == name.repo and begun.revision != commit:
        raise LaminarError(
            f"model.path={name} is commit {commit[:12]}, the run in {config.run_dir} began with "
            f"{begun.revision[:12]}; leave the revision out to go on with that, or set resume=never"
        )


def _begun_with(config: RunConfig) -> HubName | None:
    """The model that the run in run_dir began with, by its config.yaml."""
    file = Path(config.run_dir) / "config.yaml"
    if config.resume != "auto" or not file.is_file():
        return None
    try:
        return recorded_name(str(load_yaml(file.read_text())["model"]["path"]))
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None  # torn by a crash: the run's own start-up judges it


def _in_cache(path: str) -> bool:
    """Whether the folder is in this process's hub cache, and so is ours to complete."""
    from huggingface_hub import constants

    return Path(path).parents[2].resolve() == Path(constants.HF_HUB_CACHE).resolve()


def _silent(_: str) -> None:
    pass
