"""A round's updates as players: values that are those of the soups, and a model that nobody's scoring changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gym_fed.base.models import LoadedModel, load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.delta.base import BaseSpec, model_tensors, tensors_digest
from gym_fed.delta.encode import encode_source
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.evaluation import heldout_loss
from gym_fed.evaluation.soup_game import WORST, SoupGame, round_coefficients
from gym_fed.soup.building import build_contribution_method

ROWS = generate("copy", 6, split="heldout")
CODECS = {
    "signs": CodecPolicy(codec="bitdelta", small_tensors="bitdelta", error_feedback=False),
    "lora": CodecPolicy(codec="lora", lora_rank=2, error_feedback=False),
    "dense": CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False),
}
COEFFICIENTS = [0.5, 0.25, 0.125, 0.125]


@pytest.fixture(scope="module")
def tiny(tiny_base: Path) -> LoadedModel:
    return load_model(str(tiny_base))


@pytest.fixture(params=sorted(CODECS))
def updates(request: pytest.FixtureRequest, tiny: LoadedModel, tmp_path: Path) -> Iterator[list[DeltaFile]]:
    """Four of random directions; the third is zero."""
    generator = torch.Generator().manual_seed(0)
    spec = BaseSpec.of(tiny.model, "tiny")
    with ExitStack() as stack:
        found = []
        for number in range(4):
            delta = {
                name: torch.randn(shape, generator=generator) * (0.0 if number == 2 else 0.02)
                for name, shape in spec.shapes.items()
            }
            path = tmp_path / f"{number}.gymdelta"
            encode_source(delta.__getitem__, CODECS[request.param], path, spec)
            found.append(stack.enter_context(DeltaFile.open(path, spec)))
        yield found


def game_of(tiny: LoadedModel, updates: list[DeltaFile]) -> SoupGame:
    return SoupGame(tiny.model, tiny.tokenizer, updates, ROWS, COEFFICIENTS)


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20], ids=["decoded-anew", "kept"])
def test_a_coalitions_value_is_what_its_soup_does_and_no_path_to_it_matters(
    tiny: LoadedModel, updates: list[DeltaFile], kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.evaluation.soup_game.KEPT_BYTES", kept_bytes)
    game = game_of(tiny, updates)
    before = heldout_loss(tiny.model, tiny.tokenizer, ROWS)
    for members in [(0,), (0, 1), (1,), (1, 3), (0, 1, 3), (0, 1, 2, 3), (3,), (2,), (0, 3), (0, 1, 3)] * 2:
        fresh = {name: tensor.clone() for name, tensor in model_tensors(tiny.model).items()}
        for i in members:
            apply_delta(tiny.model, updates[i], COEFFICIENTS[i])
        after = heldout_loss(tiny.model, tiny.tokenizer, ROWS)
        for name, tensor in model_tensors(tiny.model).items():
            tensor.copy_(fresh[name])
        assert game.value(frozenset(members)) == pytest.approx(before - after, abs=1e-5), members
    assert game.value(frozenset()) == 0.0


def test_the_model_is_as_it_was_whatever_happens(
    tiny: LoadedModel, updates: list[DeltaFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = tensors_digest(tiny.model)
    game = game_of(tiny, updates)
    tiny.model.train()
    build_contribution_method("estimate", {}).score(game)
    build_contribution_method("leave_one_out", {}).score(game)
    assert tiny.model.training
    tiny.model.eval()
    assert tensors_digest(tiny.model) == digest
    assert all(p.grad is None and p.requires_grad for p in tiny.model.parameters())

    def broken(*_: object, **__: object) -> Tensor:
        assert tensors_digest(tiny.model) != digest
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny.model, "forward", broken)
    for work in (lambda: game.value(frozenset({0})), lambda: game.slopes(np.ones(4))):
        with pytest.raises(KeyboardInterrupt):
            work()
        assert tensors_digest(tiny.model) == digest
    assert all(p.grad is None and p.requires_grad for p in tiny.model.parameters())


def test_slopes_are_those_of_the_value_and_zeros_have_none(
    tiny: LoadedModel, updates: list[DeltaFile]
) -> None:
    game = game_of(tiny, updates)
    blocks = game.slopes(np.array([1.0, 1.0, 1.0, 0.0]))
    assert blocks.shape == (4, len(ROWS))
    slopes = blocks.sum(axis=1)
    half = SoupGame(tiny.model, tiny.tokenizer, updates, ROWS, [0.5, 0.25, 0.125, 0.125 / 16])
    rise = (half.value(frozenset({0, 1, 3})) - half.value(frozenset({0, 1}))) * 16
    assert slopes[3] == pytest.approx(rise, rel=0.05)
    assert slopes[2] == game.chance()[2] == 0.0
    assert (game.chance()[[0, 1, 3]] > 0).all()


def test_the_gram_matrix_is_that_of_the_decoded_updates(tiny: LoadedModel, updates: list[DeltaFile]) -> None:
    shapes = {name: tensor.shape for name, tensor in model_tensors(tiny.model).items()}
    flat = [
        torch.cat([(u.decode(n) if n in u else torch.zeros(shape)).flatten() for n, shape in shapes.items()])
        for u in updates
    ]
    rows = torch.stack(flat).double()
    np.testing.assert_allclose(game_of(tiny, updates).gram(), (rows @ rows.T).numpy(), rtol=1e-4, atol=1e-6)


def test_a_model_that_breaks_counts_for_a_bound(tiny: LoadedModel, tmp_path: Path) -> None:
    spec = BaseSpec.of(tiny.model, "tiny")

    def huge(name: str) -> Tensor:
        return 100 * torch.randn(spec.shapes[name], generator=torch.Generator().manual_seed(0))

    encode_source(huge, CODECS["dense"], tmp_path / "huge.gymdelta", spec)
    with DeltaFile.open(tmp_path / "huge.gymdelta", spec) as update:
        assert SoupGame(tiny.model, tiny.tokenizer, [update], ROWS, [1.0]).value(frozenset({0})) == -WORST
        assert round_coefficients([update, update], [1.0, 3.0], update.norm() / 2, 0.5) == [0.0625, 0.1875]
        with pytest.raises(GymError, match="1 update but 2 coefficients"):
            SoupGame(tiny.model, tiny.tokenizer, [update], ROWS, [1.0, 1.0])
        other = torch.nn.Linear(2, 2)
        with pytest.raises(GymError, match="does not fit the model") as refused:
            SoupGame(other, tiny.tokenizer, [update], ROWS, [1.0])
        assert refused.value.code is ErrorCode.BASE_MISMATCH
