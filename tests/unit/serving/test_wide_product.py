"""Products in float32 with weights in bfloat16: of every block, whatever its size."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from gym_fed.serving.forward import wide_product


@pytest.mark.parametrize("block", [1, 7 * 16, 1 << 20])
@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16), (0, 16)])
def test_a_product_block_by_block_is_that_of_the_widened_weights(
    shape: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide_product, "_BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 16, generator=generator).to(torch.bfloat16)
    x = torch.randn(*shape, generator=generator).to(torch.bfloat16)
    found = wide_product.wide_product(x, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, functional.linear(x.float(), weight.float()), rtol=1e-5, atol=1e-5)
