"""`eval "$(laminar --completion bash)"`: bash completes commands, options, keys, and the values of a choice.

The script asks `laminar --complete LINE` for the candidates, so that they are those of the installed version,
and of the folder that `--config-dir` names on the line. Where there are none, bash offers files.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from laminar_hpc.config.bounds import Choices, allowed, plain_type
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import keys_of
from laminar_hpc.config.options import take_config_dir
from laminar_hpc.config.words import Keys

if TYPE_CHECKING:
    from laminar_hpc.launch.command import Subcommand

# readline replaces only what stands behind the last = or : of the word
SCRIPT = r"""_laminar() {
  local line=${COMP_LINE:0:COMP_POINT} word head IFS=$'\n'
  word=${line##*[[:space:]]} head=${word%"${word##*[=:]}"}
  COMPREPLY=($(laminar --complete "$line" 2>/dev/null))
  COMPREPLY=("${COMPREPLY[@]#"$head"}")
}
complete -o nospace -o default -F _laminar laminar"""


def script(shell: str) -> str:
    """What `eval` is to be given. Raises LaminarError for another shell than bash."""
    if shell != "bash":
        raise LaminarError(f'--completion={shell}: only bash; write eval "$(laminar --completion bash)"')
    return SCRIPT


def candidates(line: str, commands: "Mapping[str, Subcommand]") -> list[str]:
    """The words that the last word of a line may become; a complete one ends with a space."""
    words = line.split()
    current = "" if line[-1:].isspace() else words.pop()
    if len(words) < 2:
        return _whole([*commands, "help", "--version"], current)
    name, before = words[1], words[2:]
    options = commands[name].options if name in commands else {}
    if current.startswith("-"):
        return _whole([*(flags.split()[0] for flags in options), "--help"], current)
    last = before[-1] if before else ""
    told = next((told for flags, told in options.items() if last in flags.split()), {})
    choices = told.get("choices", ())
    if choices and "nargs" not in told:
        return _whole(choices, current)
    names = commands[name].names() if options and not before else choices
    return [*_whole(names, current), *_of_keys(_keys(name, before), current)]


def _whole(names: Sequence[str], current: str) -> list[str]:
    return [f"{name} " for name in names if name.startswith(current)]


def _keys(command: str, before: Sequence[str]) -> Keys | None:
    if command == "train":
        own = None
        with contextlib.suppress(LaminarError):
            own = take_config_dir(before)[0]
        return keys_of(own)
    if command in ("sim", "plan") and before:
        from laminar_hpc.simulator.schema import PlanConfig, SimulationConfig

        return Keys(SimulationConfig if command == "sim" else PlanConfig, {}, "")
    return None


def _of_keys(keys: Keys | None, current: str) -> list[str]:
    """Keys up to their next dot; behind the `=` the names that may stand there, also after a comma."""
    if keys is None:
        return []
    key, equals, value = current.partition("=")
    if not equals:
        matching = (f"{name}=" for name in [*keys.groups, *keys.fields] if name.startswith(key))
        # one level at a time: `tra` becomes `trainer.`, not its ten keys
        return list(dict.fromkeys(name[: name.find(".", len(key)) + 1] or name for name in matching))
    head, comma, last = value.rpartition(",")
    names = [name for name in _values(keys, key) if name.startswith(last)]
    return [f"{key}={head}{comma}{name} " for name in names]


def _values(keys: Keys, key: str) -> Sequence[str]:
    if key in keys.groups:
        return keys.groups[key]
    if key not in keys.fields:
        return ()
    limits = allowed(keys.fields[key])
    if isinstance(limits, Choices):
        return list(limits.names)
    return ("true", "false") if plain_type(keys.fields[key])[0] is bool else ()
