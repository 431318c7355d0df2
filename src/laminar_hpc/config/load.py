"""From the command line to a checked RunConfig: Hydra composes `conf/`, this refuses what does not fit, in one line. Imports no torch."""

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


def shipped_directory(name: str) -> Path:
    """`conf`, `examples` or `slurm` of the source tree, or the copy inside an installed wheel."""
    from_source = (_SOURCE_TREE / "conf" / "config.yaml").exists()
    return (_SOURCE_TREE if from_source else Path(__file__).resolve().parents[1]) / name


def conf_directory() -> Path:
    return shipped_directory("conf")


def examples_directory(path: str) -> str:
    """Resolves `${examples:...}`."""
    return str(shipped_directory("examples") / path)


def load_config(overrides: list[str]) -> RunConfig:
    """Composes conf/config.yaml with Hydra overrides. Raises LaminarError that names the wrong key or value."""
    if "--config-dir" in overrides:
        at = overrides.index("--config-dir")
        folder = Path(overrides[at + 1]).resolve()
        overrides = [*overrides[:at], *overrides[at + 2 :], f"hydra.searchpath=[file://{folder}]"]
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
