"""`laminar train --cfg` and `--info`: what the words compose to, and from where. Nothing is started."""

import contextlib
import io
import logging
from collections.abc import Sequence

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from laminar_hpc.config.directories import conf_directory
from laminar_hpc.config.load import dump_config, group_overrides, hydra_over, load_config, read_words
from laminar_hpc.config.schema import RunConfig


def composed(words: Sequence[str], what: str) -> str:
    """YAML of the configuration (job), of Hydra's own settings (hydra), or of both (all).

    Raises Refused for wrong words and values."""
    job = dump_config(load_config(words))
    if what == "job":
        return job
    _, read, own = read_words(words)
    with hydra_over(conf_directory(), "schema", RunConfig):
        both = compose("config", overrides=group_overrides(read, own), return_hydra_config=True)
    return OmegaConf.to_yaml({"hydra": both.hydra}) + (job if what == "all" else "")


def information(words: Sequence[str], what: str) -> str:
    """What Hydra says of the files: search path, list and tree of defaults, plugins. Raises as `composed`."""
    job = dump_config(load_config(words))
    if what == "config":
        return job
    _, read, own = read_words(words)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), hydra_over(conf_directory(), "schema", RunConfig):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        hydra.show_info(what, "config", group_overrides(read, own))
    logging.getLogger().handlers.clear()  # Hydra's, which would print every later line of a log
    return printed.getvalue()
