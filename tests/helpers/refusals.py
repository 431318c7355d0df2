"""What a command line is refused with."""

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.launch import cli


def refusal(*words: str) -> list[str]:
    """The lines of a refused command line."""
    with pytest.raises(LaminarError) as error:
        cli.run(list(words))
    return str(error.value).splitlines()
