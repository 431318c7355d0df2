"""How every room reads YAML: by libyaml where PyYAML was built with it, ten times as fast as in Python."""

from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(text: str) -> Any:
    """The value of a document of plain types. Raises yaml.YAMLError where the text is not one."""
    return yaml.load(text, Loader=_LOADER)
