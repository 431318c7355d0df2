"""From the command line to a RunConfig: Hydra composes `conf/`, the command line goes on top, and what does
not fit is refused, one line for each mistake. Every value of the result is within its bounds. Imports no
torch."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import GrammarParseError, OmegaConfBaseException, ValidationError

from laminar_hpc.config.bounds import Bounds, allowed, shown, wrong_values
from laminar_hpc.config.check import problems
from laminar_hpc.config.directories import conf_directory, examples_directory
from laminar_hpc.config.errors import LaminarError, Refused, first_line
from laminar_hpc.config.options import take_config_dir
from laminar_hpc.config.schema import RENAMED, RunConfig
from laminar_hpc.config.words import Keys, Words
from laminar_hpc.config.yaml_text import load_yaml

_REFERENCE = "a reference is ${KEY}, or ${oc.env:NAME} for a variable of the environment"
_GROUPS = ("experiment", "pipeline")  # folders of conf/
_PATHS = (
    "run_dir",
    "store_dir",
    "model.path",
    "model.lora.path",
    "data.train",
    "relay.shm_dir",
    "checkpoint.key",
    "observability.prometheus_key",
)
Config = TypeVar("Config")
_UNQUOTED_SPAN = re.compile(r"^\s*replicas:\s*(\d+:\d+)\s*(?:#.*)?$", re.MULTILINE)
_named: dict[str, type] = {}  # what Hydra's store holds


def group_names(folder: Path) -> list[str]:
    """The files of a group, by the names that the command line has for them."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _search_path(directory: Path) -> str:
    """Hydra's override for a second folder of configurations; conf/ goes before it."""
    quoted = str(directory).replace("\\", "\\\\").replace('"', '\\"')
    return f'hydra.searchpath=["file://{quoted}"]'


def keys_of(own: Path | None = None) -> Keys:
    """The keys of a run, and the groups of files in conf/ and in a folder of the user's own."""
    folders = [conf_directory()] if own is None else [conf_directory(), own]
    groups = {
        group: sorted({n for folder in folders for n in group_names(folder / group)}) for group in _GROUPS
    }
    return Keys(RunConfig, groups, "in docs/configuration.md")


def read_words(words: Sequence[str]) -> tuple[Keys, Words, Path | None]:
    """The keys, the words read with them, and the folder of `--config-dir`."""
    own, settings = take_config_dir(words)
    keys = keys_of(own)
    return keys, keys.read(settings), own


def load_config(
    words: Sequence[str], further: Callable[[RunConfig, list[str]], list[str]] | None = None
) -> RunConfig:
    """conf/config.yaml, and the groups of `--config-dir DIR` if given, with the command line on top.

    A name that both folders have is conf/'s, as with Hydra's own flag. Raises Refused with a line for every
    wrong word and value, and with what `further` adds to these."""
    keys, read, own = read_words(words)
    if read.broken:
        raise Refused(read.wrong)
    read.wrong += _unquoted_spans(read, [own] if own else [])
    config = compose_config(RunConfig, "schema", conf_directory(), keys, read, own)
    _expand_home(config)
    if read.wrong or wrong_values(config):
        lines = [*read.wrong, *problems(config, may_download=True)]
        raise Refused(dict.fromkeys([*lines, *(further(config, lines) if further else [])]))
    return config


def _expand_home(config: RunConfig) -> None:
    """Makes `~/` of paths the home folder: behind an `=` most shells leave it as it is."""
    for key in _PATHS:
        section, _, name = key.rpartition(".")
        owner = attrgetter(section)(config) if section else config
        if isinstance(value := getattr(owner, name), str):
            setattr(owner, name, os.path.expanduser(value))
    files = config.evaluation.files  # not looked at yet: an entry may be anything
    config.evaluation.files = [os.path.expanduser(f) if isinstance(f, str) else f for f in files]
    kind, colon, folder = config.source.partition(":")
    config.source = kind + colon + os.path.expanduser(folder)


def _name_schema(node: str, schema: type) -> None:
    """Hydra's store has one schema of a name, and making it takes a quarter of the time of a composition."""
    if _named.get(node) is not schema:
        ConfigStore.instance().store(name=node, node=schema)
        _named[node] = schema


@cache
def _empty() -> Any:
    """A run's configuration with its defaults, into which others are merged as copies."""
    return OmegaConf.structured(RunConfig)


@contextmanager
def hydra_over(directory: Path, node: str, schema: type) -> Iterator[None]:
    """Hydra at work on a folder of configurations, with the schema under its name there."""
    OmegaConf.register_new_resolver("examples", examples_directory, replace=True)
    _name_schema(node, schema)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(directory), version_base="1.3"):
        yield


def group_overrides(read: Words, own: Path | None) -> list[str]:
    """The part of a command line that Hydra itself composes: files by their groups, and where they are."""
    return [
        *(f"{group}={name}" for group, name in read.groups.items()),
        *([_search_path(own)] if own else []),
    ]


def _remove(composed: DictConfig, key: str, keys: Keys) -> str:
    """Takes a table's entry, or all of them, out of what the files say; a line where there is none."""
    table = keys.table_of(key) or key
    entries = OmegaConf.select(composed, table)
    names = [key.removeprefix(f"{table}.")] if key != table else list(entries)
    if any(name not in entries for name in names):
        return f"~{key}: {table} has {', '.join(map(str, entries)) or 'no entries'}; leave it out"
    with open_dict(entries):
        for name in names:
            del entries[name]
    return ""


def compose_config(
    schema: type[Config], node: str, directory: Path, keys: Keys, read: Words, own: Path | None = None
) -> Config:
    """What the files of `directory`, then of `own`, say, with `read.settings` on top; a setting of the wrong
    type gets a line in `read.wrong`.

    Raises Refused where a file itself is wrong, or a reference leads nowhere."""
    groups = group_overrides(read, own)
    place = " ".join(f"{group}={name}" for group, name in read.groups.items()) or directory
    try:
        with hydra_over(directory, node, schema):
            composed = compose("config", overrides=groups)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{mark.name}, line {mark.line + 1}" if mark else f"a file under {own or directory}"
        raise Refused([f"{where}: not YAML ({error.problem}); mend the line"]) from None
    except UnicodeDecodeError as error:
        raise Refused([f"{place}: not UTF-8 (byte {error.start}); convert the file"]) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise Refused([f"{place}: {_of_a_file(error, keys)}"]) from None
    read.wrong += [line for key in read.removed if (line := _remove(composed, key, keys))]
    for key, value in read.settings:
        try:
            OmegaConf.update(composed, key, value, merge=True, force_add=True)
        except OmegaConfBaseException as error:
            read.wrong.append(_of_a_word(key, value, error, keys))
        else:
            read.wrong += _wrong_spans(composed, key, keys)
    try:
        config: Any = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise Refused(
            [*read.wrong, f"{error.full_key or 'a reference'}: {_first_line(error)}; {_REFERENCE}"]
        ) from None
    assert isinstance(config, schema)
    return config


def _wrong_spans(composed: DictConfig, key: str, keys: Keys) -> Iterator[str]:
    """A line where a setting was to have a number or a span of numbers, and its text is neither."""
    for name, field in keys.fields.items():
        limits = allowed(field)
        if name.startswith(key) and isinstance(limits, Bounds) and limits.span:
            value = OmegaConf.select(composed, name, throw_on_resolution_failure=False)
            if isinstance(value, str) and not limits.hold(value):
                yield f"{name}={shown(value)}: {keys.requirement(name)}"


def _unquoted_spans(read: Words, folders: Sequence[Path]) -> Iterator[str]:
    """A line for each file of the user's in which YAML takes MIN:MAX for minutes and seconds."""
    for group, name in read.groups.items():
        for path in (folder / group / f"{name}.yaml" for folder in folders):
            if path.is_file() and (found := _UNQUOTED_SPAN.search(path.read_text(errors="replace"))):
                yield f'{path}: YAML reads {found[1]} as a time; write "{found[1]}" in quotes'


def _of_a_word(key: str, value: object, error: OmegaConfBaseException, keys: Keys) -> str:
    """What is wrong with a setting of the command line."""
    if isinstance(error, GrammarParseError):
        return f"{key}={shown(value)}: its ${{...}} cannot be read; {_REFERENCE}"
    # of a section's table: the key in it
    inner = key if key not in keys.sections else str(error.full_key or key)
    if keys.kind_of(inner) is None:
        return keys.unknown(inner)
    for name in inner.removeprefix(key).strip(".").split("."):
        value = value.get(name, value) if isinstance(value, dict) else value
    return f"{inner}={shown(value)}: {keys.requirement(inner)}"


def _of_a_file(error: Exception, keys: Keys) -> str:
    """What is wrong with a file that Hydra reads, in our words."""
    cause = next(
        (e for e in (error.__cause__, error.__context__) if isinstance(e, OmegaConfBaseException)), error
    )
    key = str(getattr(cause, "full_key", None) or "")
    if key in keys.groups and key not in keys.sections:
        return f"begin the file with the line `# @package _global_`; else its keys are read as {key}.KEY"
    if key and keys.kind_of(key) is None:
        return keys.unknown(key)
    if section := re.search(r"not a subclass of (\w+)Config", str(cause)):  # of `trainer: 3`, without the key
        key = section.group(1).lower()
        return f"{key}: {keys.requirement(key)}"
    if key and isinstance(cause, ValidationError):
        return f"{key}: {keys.requirement(key)}"
    if dotted := re.match(r"Key '(\w+(?:\.\w+)+)' (?:is )?not in ", str(cause)):
        *sections, name = dotted[1].split(".")
        nested = "".join(f"{section}: {{" for section in sections) + f"{name}: VALUE" + "}" * len(sections)
        return f"{dotted[1]}: a file has sections, not dots; write {nested}"
    return _first_line(cause)


def _first_line(error: Exception) -> str:
    """A library's error in one line, without where in its own code it was raised."""
    first = first_line(error)
    return first.partition(" raised while resolving interpolation: ")[2].strip('"') or first


def dump_config(config: RunConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def read_config(path: Path) -> RunConfig:
    """A run's own `config.yaml`. Raises LaminarError when the file is not one."""
    try:
        if not isinstance(read := load_yaml(path.read_text()), dict):
            raise ValueError("no settings are in it")
        written = DictConfig(read)
        for earlier, now in RENAMED.items():
            section, _, name = earlier.partition(".")
            if isinstance(inner := written.get(section), DictConfig) and name in inner:
                OmegaConf.update(written, now, inner.pop(name))
        merged: Any = OmegaConf.merge(_empty(), written)
        config = OmegaConf.to_object(merged)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        why = str(error).splitlines()[0]
        raise LaminarError(
            f"{path} is not a run's configuration ({why}); restore it, or use the version that wrote it"
        ) from None
    assert isinstance(config, RunConfig)
    return config
