"""Products in float32 with weights in bfloat16: of every block, whatever its size."""

from __future__ import annotations

import mmap
from pathlib import Path

import psutil
import pytest
import torch
from torch.nn import functional

from gym_fed.base.modeling.checkpoint import mapped_tensor
from gym_fed.serving.forward import base_weights


@pytest.mark.parametrize("block", [1, 7 * 16, 1 << 20])
@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16), (0, 16)])
def test_a_product_block_by_block_is_that_of_the_widened_weights(
    shape: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_weights, "_WIDENED_AT_ONCE", block)
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
