"""From the command line to a checked RunConfig: Hydra composes `conf/`, this refuses what does not fit, in one line. Imports no torch."""

import importlib.resources
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig

_SOURCE_TREE = Path(__file__).resolve().parents[3]


def conf_directory() -> Path:
    """`conf/` of the source tree, or the copy inside an installed wheel."""
    if (_SOURCE_TREE / "conf" / "config.yaml").exists():
        return _SOURCE_TREE / "conf"
    return Path(str(importlib.resources.files("laminar_hpc.conf")))


def examples_directory(path: str) -> str:
    """Resolves `${examples:...}`: the examples of the source tree."""
    return str(_SOURCE_TREE / "examples" / path)


def take_config_dir(words: list[str]) -> tuple[Path | None, list[str]]:
    """Splits `--config-dir DIR` or `--config-dir=DIR`, anywhere in the words, from the overrides. DIR is made
    absolute.

    Raises LaminarError when DIR is missing, given twice, or holds no configuration group.
    """
    found: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        if flag == "--config-dir":
            found.append(value if equals else next(left, ""))
        else:
            rest.append(word)
    if not found:
        return None, rest
    usage = "write --config-dir DIR, where DIR holds experiment/NAME.yaml"
    if len(found) > 1 or not found[0]:
        wrong = f"one folder, not {len(found)}" if found[0] else "no folder given"
        raise LaminarError(f"--config-dir: {wrong}; {usage}")
    directory = Path(found[0]).expanduser().absolute()
    if not directory.is_dir():
        raise LaminarError(f"--config-dir={found[0]}: no such folder; {usage}")
    if not any(directory.glob("*/*.yaml")):
        loose = next(iter(sorted(directory.glob("*.yaml"))), None)
        cure = f"move {loose.name} to {directory / 'experiment' / loose.name}" if loose else usage
        raise LaminarError(f"--config-dir={found[0]}: no group of configurations in it; {cure}")
    return directory, rest


def with_absolute_config_dir(words: list[str]) -> list[str]:
    """The same words for a process that may have another working directory."""
    directory, rest = take_config_dir(words)
    return rest if directory is None else [f"--config-dir={directory}", *rest]


def _search_path(directory: Path) -> str:
    """Hydra's override for a second folder of configurations; conf/ goes before it."""
    quoted = str(directory).replace("\\", "\\\\").replace('"', '\\"')
    return f'hydra.searchpath=["file://{quoted}"]'


def load_config(words: list[str]) -> RunConfig:
    """Composes conf/config.yaml, and the groups of `--config-dir DIR` if given, with Hydra overrides.

    A name that both folders have is conf/'s, as with Hydra's own flag. Raises LaminarError that names the
    wrong key or value.
    """
    directory, overrides = take_config_dir(words)
    if directory is not None:
        overrides = [*overrides, _search_path(directory)]
    OmegaConf.register_new_resolver("examples", examples_directory, replace=True)
    ConfigStore.instance().store(name="schema", node=RunConfig)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_directory()), version_base="1.3"):
            composed = compose("config", overrides=overrides)
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise LaminarError(f"configuration: {_explain(error)}; the keys are in docs/configuration.md") from None
    assert isinstance(config, RunConfig)
    return config


def _explain(error: Exception) -> str:
    """Hydra's and OmegaConf's messages, with the useful line first and the object dumps left out."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith(("object_type", "reference_type", "To append", "Set the env"))]
    return "; ".join(useful[:3]).replace("    full_key", "key").replace("full_key", "key")


def dump_config(config: RunConfig) -> str:
    """YAML of the resolved configuration."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def read_config(path: Path) -> RunConfig:
    """A run's own `config.yaml`. Raises LaminarError when the file is not one."""
    try:
        merged: Any = OmegaConf.merge(OmegaConf.structured(RunConfig), DictConfig(yaml.safe_load(path.read_text())))
        config = OmegaConf.to_object(merged)
    except (OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise LaminarError(f"{path} is not a run's configuration: {str(error).splitlines()[0]}") from None
    assert isinstance(config, RunConfig)
    return config
