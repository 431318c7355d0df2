"""The names of SGLang's own arguments, read from its source text: importing it takes seconds, and a refusal
shall not.

`rollout.engine_arguments` goes to SGLang as it is; a name that it does not have would end the run half a
minute later.
"""

import importlib.util
import re
from pathlib import Path

from laminar_hpc.config.errors import did_you_mean
from laminar_hpc.config.schema import RunConfig

_FEWEST = 100  # names; fewer mean that this version writes them in another way, and nothing can be said
_FIELD = re.compile(r"^    ([a-z]\w+)\s*:", re.M)
_FLAG = re.compile(r"[\"']--([a-z][\w-]+)[\"']")


def argument_names() -> set[str]:
    """Names as on SGLang's command line, without dashes: rather too many than too few. Empty where they
    cannot be found."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return set()
    folder = Path(spec.submodule_search_locations[0]) / "srt"
    found = set()
    for file in (folder / "server_args.py", *(folder / "arg_groups" / "fields").glob("*.py")):
        if file.is_file():
            text = file.read_text()
            found |= {name.replace("_", "-") for name in _FIELD.findall(text)} | set(_FLAG.findall(text))
    return found if len(found) >= _FEWEST else set()


def unknown_arguments(config: RunConfig) -> list[str]:
    """One line for each entry of rollout.engine_arguments that SGLang does not have; its argparse takes
    unique beginnings too."""
    if not config.rollout.engine_arguments or config.rollout.engine != "sglang":
        return []
    names = argument_names()
    asked = {key: key.replace("_", "-") for key in config.rollout.engine_arguments}
    return [
        f"rollout.engine_arguments.{key}: SGLang's server has no argument --{name}{did_you_mean(name, names)}"
        for key, name in asked.items()
        if names and not any(known.startswith(name.removeprefix("no-")) for known in names)
    ]
