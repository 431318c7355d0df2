"""The parser in C reads what the one in Python reads, and refuses what it refuses."""

import pytest
import yaml

from laminar_hpc.config import yaml_text
from laminar_hpc.config.directories import conf_directory
from laminar_hpc.config.load import dump_config
from laminar_hpc.config.schema import RunConfig


def test_every_shipped_file_is_read_alike():
    """conf/, and a run's own configuration: values, types and the order of keys."""
    texts = [path.read_text() for path in conf_directory().rglob("*.yaml")]
    texts += [dump_config(RunConfig()), "a: [1e-6, 1_000, 0o17, on, ~, '1', 2024-01-02]\nb: {ü: \"\\x41\"}\n"]
    assert len(texts) > 20
    for text in texts:
        assert repr(yaml_text.load_yaml(text)) == repr(yaml.safe_load(text))


@pytest.mark.parametrize("text", ["a: [1\n", "a: b: c", "\ta: 1", "a: !!python/name:os.system", "{", "a: \0"])
def test_what_is_not_yaml_is_refused(text):
    with pytest.raises(yaml.YAMLError):
        yaml_text.load_yaml(text)


def test_the_parser_in_c_is_used_where_there_is_one():
    """Of the pinned PyYAML there is."""
    assert yaml_text._LOADER is yaml.CSafeLoader
