"""Adapters on the CPU: one product for all adapters of a batch is the sum of each request's own."""

from types import SimpleNamespace

import pytest
import torch

from laminar_hpc.engine.sglang.plugin.platform import activate

activate()  # before SGLang is imported, as its own processes do

from laminar_hpc.engine.sglang.plugin import cpu_lora  # noqa: E402

PLACES, RANK, INPUTS = 6, 4, 10
OFFSETS = [0, 8, 11, 14]  # of three parts of a fused projection
RANKS, SCALINGS = [0, 4, 4, 4, 4, 4], [0.0, 2.0, 2.0, 2.0, 3.0, 2.0]  # place 0 is the model alone


@pytest.mark.parametrize(
    ("places", "lengths"),
    [
        ([1, 1], [3, 2]),  # one adapter
        ([1, 2, 1, 3], [1, 1, 1, 1]),  # decoding, in any order
        ([1, 0, 4], [5, 1, 2]),  # some by the model alone; adapters of other scalings, not adjacent
        ([0, 0], [1, 2]),
        ([2, 4], [1, 7]),  # padded
        ([1, 2], [4, 4]),
    ],
)
def test_each_token_is_of_its_own_adapter(
    places: list[int], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: what is added to each token's output is its request's scaling * B A x, part by part, and
    nothing where it has no adapter."""
    monkeypatch.setattr(
        cpu_lora, "generate_sequence_lengths", lambda batch, device: torch.tensor(batch, dtype=torch.int32)
    )
    draw = torch.Generator().manual_seed(len(places))
    a = torch.randn(PLACES, 3 * RANK, INPUTS, generator=draw)
    b = torch.randn(PLACES, OFFSETS[-1], RANK, generator=draw)
    x = torch.randn(sum(lengths), INPUTS, generator=draw)
    base = torch.randn(sum(lengths), OFFSETS[-1], generator=draw)
    backend = cpu_lora.CpuLoraBackend(PLACES, torch.device("cpu"))
    backend.prepare_lora_batch(lengths, places, RANKS, SCALINGS, use_cuda_graph=False)
    found = backend.run_qkv_lora(
        x, a, b, output_offset_cpu=torch.tensor(OFFSETS), base_output=base.clone(), max_qkv_out_dim=8
    )
    expected, at = base.double(), 0
    for place, length in zip(places, lengths, strict=True):
        for part in range(3 if RANKS[place] else 0):
            first, last = OFFSETS[part], OFFSETS[part + 1]
            low = x[at : at + length].double() @ a[place, part * RANK : (part + 1) * RANK].double().T
            expected[at : at + length, first:last] += SCALINGS[place] * low @ b[place, first:last].double().T
        at += length
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_rows_of_a_pass_that_verifies_drafts_are_of_their_requests_adapter() -> None:
    """SGLang would take as many rows of each request (lora/utils.py:517); drafts differ in length."""
    backend = cpu_lora.CpuLoraBackend(PLACES, torch.device("cpu"))
    batch = SimpleNamespace(spec_info=SimpleNamespace(lengths=torch.tensor([1, 3, 2])))
    backend.prepare_lora_batch(batch, [2, 4, 2], RANKS, SCALINGS, use_cuda_graph=False)
    assert backend.batch_info.tokens.tolist() == [0, 4, 5, 1, 2, 3]


def test_nothing_is_pinned_inside() -> None:
    """Promise: what SGLang pins while it wraps a model's layers stays pageable, which a machine without an
    accelerator has; tensors made otherwise are as they are."""

    def wrap() -> list[torch.Tensor]:
        return [torch.tensor([1, 2], pin_memory=True), torch.arange(3).pin_memory()]

    found = cpu_lora.without_pinning(wrap)
    assert [tensor.tolist() for tensor in found] == [[1, 2], [0, 1, 2]]
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            wrap()
