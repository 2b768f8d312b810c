"""LoRA factors made to deceive: what they hide, how they overflow, and honest factors that look like them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_quant import CodecError, Encoded
from gym_quant.codecs.lora import Lora, cancels
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import lora_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.soup import low_rank
from gym_fed.soup.low_rank import LowRank, products
from gym_fed.soup.merging import merge
from gym_fed.soup.stacks import FactorStack

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


SPEC = BaseSpec.of({"w.weight": torch.zeros(48, 32)}, "tiny")
EXACT = CodecPolicy(codec="lora", lora_rank=4, factors="float32", error_feedback=False)
DENSE = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)


@contextlib.contextmanager
def opened(folder: Path, sent: Sequence[tuple[Tensor, Tensor, float]]) -> Iterator[list[DeltaFile]]:
    with contextlib.ExitStack() as stack:
        files = []
        for index, factors in enumerate(sent):
            path = folder / f"{index}.gymdelta"
            lora_delta({"w.weight": factors}, path, SPEC, None, EXACT)
            files.append(stack.enter_context(DeltaFile.open(path, SPEC)))
        yield files


def honest(count: int, one_a: bool = False) -> list[tuple[Tensor, Tensor, float]]:
    """Updates that agree in the main."""
    a, b = randn(4, 32), randn(48, 4, seed=1)
    return [
        (a if one_a else a + 0.3 * randn(4, 32, seed=9 + i), b + 0.2 * randn(48, 4, seed=99 + i), 0.01)
        for i in range(count)
    ]


@pytest.mark.parametrize("rule", ["trimmed_mean", "median", "mean_around_median"])
@pytest.mark.parametrize("steps", [[], ["norm_cap", "nnm"]], ids=str)
def test_with_one_a_a_b_beyond_float32_is_one_more_malicious_client(
    tmp_path: Path, rule: str, steps: list[str]
) -> None:
    sent = [(a * 1e-3, b, s) for a, b, s in honest(6, one_a=True)]
    sent.append((sent[0][0], sent[0][1] / sent[0][1].abs().max() * 1e38, 20.0))
    recipe = SoupRecipe(aggregator=rule, num_malicious_nodes=1, pre_aggregators=steps, codec=DENSE)
    with opened(tmp_path, sent) as updates:
        assert len(FactorStack("w.weight", updates, (48, 32)).factors) == 7
        norms = sorted(update.norm() for update in updates)
        assert norms[-1] > 1e30
        assert merge(updates, [1.0] * 7, recipe, tmp_path / "soup", SPEC).norm < 2 * norms[-2]


@pytest.mark.parametrize("rank", [8, 32])
def test_a_tiny_a_beside_a_huge_scaling_is_written_as_an_adapter(tmp_path: Path, rank: int) -> None:
    sent = honest(5)
    sent.append((sent[0][0] * 1e-42, sent[0][1], 1e40))
    sent.append((sent[0][0] * 1e30, sent[0][1] * 1e-32, 1.0))
    adapter = CodecPolicy(codec="lora", lora_rank=rank, error_feedback=False)
    with opened(tmp_path, sent) as updates:
        merge(updates, [1.0] * 7, SoupRecipe(codec=adapter), tmp_path / "soup", SPEC)
        wanted = torch.stack([update.decode("w.weight").double() for update in updates]).mean(dim=0)
    with DeltaFile.open(tmp_path / "soup", SPEC) as soup:
        assert soup.record("w.weight").params["rank"] == min(rank, 28)
        lost = (soup.decode("w.weight") - wanted).norm() / wanted.norm()
    assert lost < (0.25 if rank == 8 else 0.02)


@pytest.mark.parametrize("factors", ["bfloat16", "float32"])
def test_a_soup_of_updates_that_all_but_cancel_is_written_as_it_is(tmp_path: Path, factors: str) -> None:
    a, b = randn(4, 32), randn(48, 4, seed=1)
    sent = [(a, b, 1.0), (-a * (1 - 2.0**-13), b, 1.0)]
    adapter = CodecPolicy.model_validate({**EXACT.model_dump(), "lora_rank": 16, "factors": factors})
    with opened(tmp_path, sent) as updates:
        merge(updates, [1.0] * 2, SoupRecipe(codec=adapter), tmp_path / "soup", SPEC)
    wanted = (b.double() @ a.double()) * 2.0**-14
    with DeltaFile.open(tmp_path / "soup", SPEC) as soup:
        assert (soup.decode("w.weight") - wanted).norm() < 0.01 * wanted.norm()


def test_products_of_updates_far_below_one_are_those_of_their_directions(tmp_path: Path) -> None:
    a, b = randn(4, 32), randn(48, 4, seed=1)
    sent = [(a, b, 1.0), (a * 2.0**100, b, 2.0**-620)]
    with opened(tmp_path, sent) as updates:
        stack = FactorStack("w.weight", updates, (48, 32))
        norms = [update.norm() for update in updates]
        found = stack.products(torch.tensor([1 / norm for norm in norms], dtype=torch.float64))
    torch.testing.assert_close(found, torch.ones(2, 2, dtype=torch.float64))


def test_squares_that_rounding_takes_below_zero_are_zero() -> None:
    squares = []
    for seed in range(60):
        a, b = telescope(torch.bfloat16, seed)
        squares.append(float(products([LowRank(a.double(), b.double())])[0, 0]))
    assert min(squares) == 0.0


def test_products_of_many_updates_hold_no_gram_matrix_of_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits in blocks, each of which is small."""
    factors = [
        None if i == 5 else LowRank(randn(16, 8, seed=i).double(), randn(8, 16, seed=50 + i).double())
        for i in range(40)
    ]
    sizes, exact = [], low_rank.exact_products
    monkeypatch.setattr(low_rank, "_BLOCK_RANKS", 1 << 30)
    whole = products(factors)
    monkeypatch.undo()

    def watched(left: Any, right: Any) -> Tensor:
        found = exact(left, right)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(low_rank, "exact_products", watched)
    assert torch.equal(products(factors), whole)
    assert max(sizes) <= 512 * 512
    assert bool((whole[5] == 0.0).all())


def test_a_tensor_is_announced_once_whichever_way_it_is_written(tmp_path: Path) -> None:
    both = BaseSpec.of({"a": torch.zeros(48, 32), "b": torch.zeros(48, 32)}, "tiny")
    lora_delta({"a": honest(1)[0], "b": honest(1)[0]}, tmp_path / "factors", both)
    lora_delta({"a": honest(2)[1], "b": honest(1)[0]}, tmp_path / "other", both)
    write_delta(tmp_path / "dense", [DeltaEntry.of("b", randn(48, 32), "dense")], both)
    adapter = CodecPolicy(codec="lora", lora_rank=4, error_feedback=False)
    for beside, rule in (("dense", "mean"), ("other", "mean"), ("other", "median")):
        seen: list[str] = []
        with (
            DeltaFile.open(tmp_path / "factors", both) as one,
            DeltaFile.open(tmp_path / beside, both) as two,
        ):
            recipe = SoupRecipe(aggregator=rule, codec=adapter)
            merge([one, two], [1.0, 1.0], recipe, tmp_path / "soup", both, on_tensor=seen.append)
        assert sorted(seen) == ["a", "b"]
