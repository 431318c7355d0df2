"""Several adapters on an emulated engine: who draws, and what is refused (engine/interface.py)."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.emulated.stand import small_config
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine.interface import RequestFailed, Sums, sampling_parameters
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.simulator.emulated.engine import EmulatedEngine
from laminar_hpc.simulator.emulated.weights import weights_file
from laminar_hpc.weights.manifest import MANIFEST_FILE, encode_manifest, layout


def adapter(folder: Path, weight_id: int) -> tuple[Path, Sums]:
    """A slot with one tensor, and its sums."""
    folder.mkdir()
    manifest = layout([("base_model.model.x.lora_A.weight", (2, 3), "float32")], weight_id, weight_id)
    manifest.tensors[0].sum_words = weight_id
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return folder, {manifest.tensors[0].name: (weight_id, 0)}


async def test_each_request_is_drawn_by_the_adapter_that_it_names(tmp_path: Path) -> None:
    """Two at once; an id that is not there is refused, and one that draws is not unloaded."""
    config = small_config(tmp_path / "run")
    config.emulation.time_scale = 1000.0
    config.model.lora.rank = 4
    engine = EmulatedEngine(config, 0, tmp_path)
    sampling = sampling_parameters(config.sampling, 1.0, config.sampling.max_response_tokens, [])
    prompt = np.arange(9, dtype=np.int32)

    async def drawn(number: int, weight_id: int) -> list[int]:
        answer = await engine.generate(prompt, sampling, f"run-{number}-0-0", str(weight_id))
        return [span.weight_id for span in answer.spans]

    await engine.start(tmp_path, None, 0)
    try:
        for weight_id in (3, 4):
            folder, sums = adapter(tmp_path / str(weight_id), weight_id)
            assert await engine.load_adapter(folder, weight_id) == sums
        with pytest.raises(LaminarError, match="weight id 4 loaded already"):
            await engine.load_adapter(folder, 4)
        both = asyncio.gather(drawn(0, 3), drawn(1, 4))
        await asyncio.sleep(0)
        with pytest.raises(LaminarError, match="1 requests of it run"):
            await engine.unload_adapter(3)
        assert await both == [[3], [4]]
        await engine.unload_adapter(3)
        with pytest.raises(RequestFailed, match="no adapter of weight id '3'; loaded: 4"):
            await drawn(2, 3)
        with pytest.raises(KvRefused, match=r"weight id 3.* serves 4"):
            await engine.kv_reserve("0-1", 3, 10)
        assert await drawn(3, 4) == [4]
    finally:
        await engine.stop()


def test_a_model_of_several_files_has_the_tensors_of_all(tmp_path: Path) -> None:
    """Large models are saved in shards."""
    for number, name in enumerate(("b", "a")):
        content = {name: np.full((number + 1, 2), number, np.float32)}
        save_file(content, tmp_path / f"model-0000{number + 1}-of-00002.safetensors")
    tensors, data = weights_file(tmp_path)
    assert tensors == [("b", [1, 2]), ("a", [2, 2])]
    assert np.frombuffer(data, np.float32).tolist() == [0, 0, 1, 1, 1, 1]
