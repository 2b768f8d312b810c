"""A soup under a byte budget is made again to the bit by the recipe of the release that made it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.merging import merge

EXACT = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)


@pytest.mark.parametrize(
    ("bits", "sha256"),
    [
        (1.3, "a65d4656b514f80e974fa1c0ac007d4d4597aa715c641c6cc20221e097d3c387"),
        (2.4, "be91c15b25c5e59831c849ba4e021156329b0f2abdf0fbd4345e732260166865"),
    ],
)
def test_a_budget_of_a_stored_recipe_is_split_as_it_was(tmp_path: Path, bits: float, sha256: str) -> None:
    lots = torch.Generator().manual_seed(4)
    kinds = {"q": (40, 32), "up": (96, 32), "norm": (32,)}
    shapes = [(f"layers.{layer}.{kind}", shape) for layer in range(6) for kind, shape in kinds.items()]
    base = {name: torch.zeros(shape) for name, shape in shapes}
    tuned = {
        name: torch.randn(shape, generator=lots) * (0.01 + 0.03 * place / len(shapes))
        for place, (name, shape) in enumerate(shapes)
    }
    spec = BaseSpec.of(base, "tiny")
    encode_delta(tuned, base, EXACT, tmp_path / "update", spec)
    stored = {"codec": {"codec": "auto", "max_bits_per_weight": bits}}

    def soup(recipe: SoupRecipe) -> str:
        residual = ErrorFeedback.load(tmp_path / "none", spec.digest)
        with DeltaFile.open(tmp_path / "update", spec) as update:
            return merge([update], [1.0], recipe, tmp_path / "soup", spec, residual).sha256

    assert soup(SoupRecipe.recorded(stored)) == sha256
    assert soup(SoupRecipe.model_validate(stored)) != sha256
