"""Tensors in mapped files: the file's values, and pages that are released."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from gym_fed.base.modeling.checkpoint import Checkpoint, mapped_tensor, release_pages
from gym_fed.serving.base import load_base
from gym_fed.serving.forward import base_weights
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from tests.unit.serving.test_base_loaded import saved

MANY = 16 << 20
"""Weights: 64 MB."""
needs_advice = pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system has no such advice")


def in_memory() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, Tensor]:
    one = torch.arange(MANY, dtype=torch.float32).reshape(16, -1)
    save_file(
        {"one": one, "other": one[:, :7].contiguous(), "none": torch.empty(0, 3)},
        tmp_path / "model.safetensors",
    )
    del one
    checkpoint = Checkpoint.find(tmp_path)
    assert checkpoint is not None
    return checkpoint.mapped()


def test_a_mapped_tensor_has_the_file_s_numbers_wherever_it_begins(weights: dict[str, Tensor]) -> None:
    wanted = torch.arange(MANY, dtype=torch.float32).reshape(16, -1)
    assert torch.equal(weights["one"], wanted)
    assert torch.equal(weights["other"], wanted[:, :7])
    assert weights["none"].shape == (0, 3)


@needs_advice
def test_released_pages_leave_memory_and_come_back_with_the_same_numbers(weights: dict[str, Tensor]) -> None:
    total = float(weights["one"].sum(dtype=torch.float64))
    before = in_memory()
    release_pages(weights["one"])
    assert in_memory() < before - MANY * 3
    assert float(weights["one"].sum(dtype=torch.float64)) == total


@needs_advice
def test_a_release_leaves_other_tensors_and_those_of_no_file_alone(weights: dict[str, Tensor]) -> None:
    own = torch.ones(3)
    weights["other"].zero_()
    release_pages(own)
    release_pages(weights["one"])
    release_pages(weights["none"])
    assert own.sum() == 3
    assert not weights["other"].any()
    release_pages(weights["other"])  # what was written to it is lost
    assert weights["other"].any()


@needs_advice
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_base_keeps_the_pages_of_no_weight_that_it_packed(tmp_path: Path, tied: bool) -> None:
    folder = saved(tmp_path, tied=tied, dtype="bfloat16")
    model, _, _ = load_base(str(folder), [], "bfloat16", plain=True)
    embedding = model.get_input_embeddings().weight
    wanted = embedding.clone()
    with MultiVariantModel(model, base_format="int8") as served:
        pages = [
            part
            for part in psutil.Process().memory_maps(grouped=False)
            if part.path.startswith(str(tmp_path))
        ]
        assert served.packed
    assert pages
    assert sum(part.rss for part in pages) == 0
    assert torch.equal(embedding, wanted)


@pytest.mark.parametrize("block", [1, 7 * 16, 1 << 20])
@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16), (0, 16)])
def test_a_product_block_by_block_is_that_of_the_widened_weights(
    shape: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_weights, "_WIDE_CHUNK", block)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 16, generator=generator).to(torch.bfloat16)
    x = torch.randn(*shape, generator=generator).to(torch.bfloat16)
    found = base_weights.wide_product(x, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, functional.linear(x.float(), weight.float()), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system has no such advice")
def test_a_product_leaves_none_of_a_mapped_weight_in_memory(tmp_path: Path) -> None:
    weight = torch.arange(16 << 20, dtype=torch.int32).view(torch.bfloat16).reshape(-1, 256)
    (tmp_path / "weight").write_bytes(weight.view(torch.uint8).numpy().tobytes())
    mapped = mapped_tensor(tmp_path / "weight", torch.bfloat16, tuple(weight.shape), 0)
    before = psutil.Process().memory_info().rss
    base_weights.wide_product(torch.ones(1, 256), mapped)
    assert psutil.Process().memory_info().rss < before + weight.nbytes // 2
    assert torch.equal(mapped.view(torch.uint8), weight.view(torch.uint8))
