"""The files of a run directory that every reader begins with."""

from pathlib import Path

import yaml

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.yaml_text import load_yaml


def metrics_of(run_dir: Path) -> Path:
    """The run's metrics.jsonl. Raises LaminarError when `run_dir` is no run."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise LaminarError(
            f"{run_dir} is no run: no metrics.jsonl there; name the run_dir of a `laminar train`"
        )
    return path


def config_of(run_dir: Path) -> dict:
    """The resolved configuration; empty where the run has none. Raises LaminarError if it is unreadable."""
    path = run_dir / "config.yaml"
    try:
        if not isinstance(read := load_yaml(path.read_text()) or {}, dict):
            raise ValueError("no settings are in it")
        return read
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = str(error).splitlines()[0]
        raise LaminarError(f"{path} cannot be read as YAML ({why}); restore it from the run") from None
