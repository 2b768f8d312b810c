"""LoRA factors made to deceive: what they hide, how they overflow, and honest factors that look like them."""

from __future__ import annotations

import pytest
import torch
from gym_quant import CodecError, Encoded
from gym_quant.codecs.lora import Lora, cancels
from torch import Tensor

LORA = Lora()
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def telescope(dtype: torch.dtype, seed: int, rows: int = 64, cols: int = 64) -> tuple[Tensor, Tensor]:
    """A and B whose first components cancel each other to a vector 2**30 times smaller."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(rows, 1, generator=generator).to(dtype)
    wanted = torch.randn(cols, generator=generator).double()
    parts = [(torch.randn(cols, generator=generator) * 2.0**30).to(dtype).double()]
    rest = wanted - parts[0]
    for step in range(5):
        parts.append((rest if step else rest * 1.01).to(dtype).double())
        rest = rest - parts[-1]
    return torch.stack(parts).to(dtype), u.repeat(1, len(parts))


def check(a: Tensor, b: Tensor, scaling: float = 1.0) -> Encoded:
    stored = "float32" if a.dtype == torch.float32 else "bfloat16"
    return LORA.encode_factors(a, b, scaling, factors=stored)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stored", DTYPES)
def test_factors_that_hide_a_large_product_in_rounding_are_refused(stored: str) -> None:
    for seed in range(60):
        a, b = telescope(DTYPES[stored], seed)
        with pytest.raises(CodecError, match="cancel each other"):
            check(a, b, 100.0)


def test_quantised_components_that_cancel_are_refused() -> None:
    encoded = LORA.encode_factors(randn(4, 64), randn(64, 4), factors="int8")
    payload = {name: field.clone() for name, field in encoded.payload.items()}
    for name, field in payload.items():  # one component taken and given back
        field[1] = -field[0] if name == "b0_codes" else field[0]
        if name.endswith("_scales"):
            field[:2] *= 2.0**20
    with pytest.raises(CodecError, match="cancel each other"):
        LORA.check(payload, (64, 64), encoded.params)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("rank", [1, 4, 64, 256])
def test_factors_as_training_makes_them_are_accepted(stored: str, rank: int) -> None:
    side = max(96, rank)
    a, b = randn(rank, side) / side**0.5, randn(side, rank, seed=1)
    common_a, common_b = randn(1, side, seed=2), randn(side, 1, seed=3)
    honest = {
        "random": (a, b * 1e-2),
        "B still zero": (a, torch.zeros_like(b)),
        "A and B zero": (torch.zeros_like(a), torch.zeros_like(b)),
        "one step from zero": (a, b * 1e-12),
        "one component trained": (a, b * (torch.arange(rank) == 0)),
        "correlated": (common_a + 1e-2 * a, common_b + 1e-2 * b),
        "duplicates": (common_a.expand(rank, side), common_b.expand(side, rank)),
        "gradient of rank one": (a, common_b @ (common_a @ a.T)),
        "orders of magnitude apart": (
            a * torch.logspace(-8, 8, rank)[:, None],
            b * torch.logspace(8, -8, rank),
        ),
        "subnormal": (a * 1e-36, b * 1e-36),
    }
    for name, (left, right) in honest.items():
        encoded = check(left.to(DTYPES[stored]), right.to(DTYPES[stored]), 0.5)
        wanted = LORA.decode(encoded.payload, (side, side), encoded.params).double().norm()
        found = LORA.norm(encoded.payload, (side, side), encoded.params)
        if name != "subnormal":
            assert found == pytest.approx(float(wanted), rel=1e-5), name


@pytest.mark.parametrize("doubt", [2.0**6, 2.0**10])
def test_what_cancels_less_has_the_norm_of_its_product(doubt: float) -> None:
    """Up to the limit the norm from the factors is right; beyond it the factors are refused."""
    a, rest = randn(1, 64), randn(1, 64, seed=1)
    u = randn(64, 1, seed=2)
    left, right = torch.cat([a, -a + rest / doubt]), torch.cat([u, u], dim=1)
    encoded = check(left, right)
    wanted = LORA.decode(encoded.payload, (64, 64), encoded.params).double().norm()
    assert LORA.norm(encoded.payload, (64, 64), encoded.params) == pytest.approx(float(wanted), rel=1e-5)
    assert cancels(torch.cat([a, -a + rest / 2.0**14]), right)
