"""A hub on loopback with the demo's base model, and a cache of its own; the client is huggingface_hub's."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from helpers.models.hub_server import Hub, files_of
from helpers.paths import EXAMPLES

BASE = EXAMPLES / "arithmetic/base"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Its settings stand in the library and, for processes, in the environment."""
    monkeypatch.chdir(tmp_path)
    extra = {
        "README.md": b"# sums",
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": b"other",
        "onnx/model.onnx": b"onnx",
    }
    with Hub({**files_of(BASE), **extra}) as served:
        cache = tmp_path / "cache"
        settings = {
            "ENDPOINT": served.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": served.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(cache / "hub"),
            "HF_HUB_OFFLINE": False,
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HOME", str(cache))
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield served
