"""`eval "$(laminar --completion bash)"`: bash completes commands, options, keys, and the values of a choice.

The script asks `laminar --complete LINE` for the candidates, so that they are those of the installed version,
and of the folder that `--config-dir` names on the line. Where there are none, bash offers files.
"""

import contextlib
from collections.abc import Mapping, Sequence

from laminar_hpc.config.bounds import Choices, allowed, plain_type
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import keys_of
from laminar_hpc.config.options import CFG, INFO, take_config_dir
from laminar_hpc.config.words import Keys

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


def candidates(line: str, commands: Mapping[str, Sequence[str]]) -> list[str]:
    """The words that the last word of a line may become; a complete one ends with a space. `commands`: the
    options of each."""
    words = line.split()
    current = "" if line[-1:].isspace() else words.pop()
    if len(words) < 2:
        return [f"{name} " for name in [*commands, "help", "--version"] if name.startswith(current)]
    command, before = words[1], words[2:]
    if before and before[-1] in ("--cfg", "-c"):
        return [f"{name} " for name in CFG if name.startswith(current)]
    if current.startswith("-"):
        return [f"{name} " for name in [*commands.get(command, ()), "--help"] if name.startswith(current)]
    information = before and before[-1] in ("--info", "-i")
    names = [name for name in (INFO if information else _places(command, before)) if name.startswith(current)]
    return [*(f"{name} " for name in names), *_of_keys(_keys(command, before), current)]


def _places(command: str, before: Sequence[str]) -> list[str]:
    """The experiments or questions that a command of the simulator begins with."""
    if command not in ("sim", "plan") or before:
        return []
    from laminar_hpc.simulator.settings import experiments, questions

    return experiments() if command == "sim" else questions()


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
