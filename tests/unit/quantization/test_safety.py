"""The safety projection, on subspaces that are known by construction."""

from __future__ import annotations

import pytest
import torch
from gym_quant import CodecError
from gym_quant.safety import project_delta


def pair_that_spans(*columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Aligned and unaligned weights ``[8, 6]`` whose difference has just these output directions."""
    unaligned = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    change = torch.zeros(8, 6)
    for place, column in enumerate(columns):
        change[:, place] = column
    return unaligned + change, unaligned


def axis(place: int) -> torch.Tensor:
    return torch.eye(8)[place]


def delta_along(*places: int) -> torch.Tensor:
    delta = torch.zeros(8, 6)
    for place in places:
        delta[place] = torch.randn(6, generator=torch.Generator().manual_seed(place))
    return delta


@pytest.mark.parametrize("projection", ["fast", "exact"])
def test_a_delta_inside_the_aligned_subspace_is_left_alone(projection: str) -> None:
    delta = delta_along(2)
    found = project_delta(delta, *pair_that_spans(axis(2)), 0.9, projection)  # type: ignore[arg-type]
    assert found.cosine == pytest.approx(1.0, abs=1e-5)
    assert not found.replaced
    assert torch.equal(found.delta, delta)


@pytest.mark.parametrize("projection", ["fast", "exact"])
def test_a_delta_outside_it_becomes_nothing(projection: str) -> None:
    found = project_delta(delta_along(5), *pair_that_spans(axis(2)), 0.1, projection)  # type: ignore[arg-type]
    assert found.replaced
    assert found.cosine == pytest.approx(0.0, abs=1e-5)
    assert float(found.delta.norm()) < 1e-5


def test_of_a_delta_that_is_half_inside_the_outside_part_is_removed() -> None:
    inside, outside = delta_along(0, 1), delta_along(6)
    pair = pair_that_spans(axis(0), 3 * axis(1))
    found = project_delta(inside + outside, *pair, 0.99, "exact")
    assert found.replaced
    assert found.cosine == pytest.approx(float(inside.norm() / (inside + outside).norm()), abs=1e-5)
    assert torch.allclose(found.delta, inside, atol=1e-5)


def test_the_fast_form_is_the_papers_formula() -> None:
    generator = torch.Generator().manual_seed(3)
    delta, aligned, unaligned = (torch.randn(8, 6, generator=generator) for _ in range(3))
    v = aligned - unaligned
    wanted = (v @ v.T / v.norm()) @ delta
    cosine = float(torch.cosine_similarity(wanted.flatten(), delta.flatten(), dim=0))
    found = project_delta(delta, aligned, unaligned, 1.0)
    assert found.cosine == pytest.approx(cosine, abs=1e-5)
    assert torch.allclose(found.delta, wanted, atol=1e-4)


def test_the_exact_form_is_the_papers_projection_of_a_span_of_any_rank() -> None:
    generator = torch.Generator().manual_seed(4)
    delta, unaligned = (torch.randn(8, 6, generator=generator) for _ in range(2))
    v = torch.randn(8, 3, generator=generator) @ torch.randn(3, 6, generator=generator)
    wide = v.double()
    wanted = wide @ torch.linalg.pinv(wide.T @ wide, rtol=1e-6) @ wide.T @ delta.double()
    found = project_delta(delta, unaligned + v, unaligned, 1.0, "exact")
    assert found.replaced
    assert torch.allclose(found.delta.double(), wanted, atol=1e-4)


def test_the_threshold_decides() -> None:
    delta, pair = delta_along(0, 6), pair_that_spans(axis(0))
    cosine = project_delta(delta, *pair, 0.0).cosine
    assert cosine is not None
    assert not project_delta(delta, *pair, cosine - 1e-6).replaced
    assert project_delta(delta, *pair, cosine + 1e-6).replaced


def test_a_layer_that_alignment_did_not_touch_has_no_subspace_and_keeps_its_delta() -> None:
    weight, delta = torch.ones(8, 6), delta_along(1)
    found = project_delta(delta, weight, weight, 1.0)
    assert found.cosine is None
    assert not found.replaced
    assert torch.equal(found.delta, delta)


def test_layers_of_another_shape_and_values_that_are_not_finite_are_refused() -> None:
    good = torch.ones(8, 6)
    with pytest.raises(CodecError, match=r"\[8, 6\], \[8, 5\], \[8, 6\]"):
        project_delta(good, torch.ones(8, 5), good, 0.5)
    with pytest.raises(CodecError, match="not finite"):
        project_delta(good, good * float("nan"), good, 0.5)
