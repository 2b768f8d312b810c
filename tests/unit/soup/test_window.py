"""The window of a continuous round: the rule weighs everybody, and only the new updates are added."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.gram import CombinationWeights, GramMatrix
from gym_fed.soup.merging import merge
from gym_fed.soup.pipeline import Pipeline
from gym_fed.soup.window import RoundWindow, staleness_weight

DENSE = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
SHAPES = {"w.weight": (4, 64)}


def plan(*coefficients: float) -> tuple[CombinationWeights, torch.Tensor]:
    """The coefficients of updates of equal length."""
    found = torch.tensor(coefficients, dtype=torch.float64)
    return CombinationWeights.single(found), torch.ones_like(found)


def test_fresh_updates_of_equal_weight_are_averaged() -> None:
    combination, admitted = RoundWindow(2, [0, 0]).added(*plan(0.5, 0.5))
    assert admitted == (1.0, 1.0)
    assert combination.matrix.tolist() == [[0.5, 0.5]]


def test_a_stale_update_counts_less_and_is_added_with_less_weight() -> None:
    combination, admitted = RoundWindow(2, [0, 3]).added(*plan(0.5, 0.5))
    assert admitted == (1.0, staleness_weight(3)) == (1.0, 0.5)
    assert combination.matrix.tolist() == [[0.5, 0.25]]


def test_an_update_of_weight_zero_adds_nothing_and_does_not_count() -> None:
    combination, admitted = RoundWindow(8, [0, 0]).added(*plan(0.0, 0.25, 0.25, 0.5))
    assert admitted == (0.0, 1.0)
    assert combination.matrix.tolist() == [[0.0, 1.0 / 4]]


def test_an_early_merge_of_a_rejected_majority_does_not_amplify_the_others() -> None:
    combination, _ = RoundWindow(8, [0, 0, 0]).added(*plan(*[0.01] * 3, *[0.97 / 17] * 17))
    assert float(combination.matrix.sum()) == pytest.approx(3 * 0.2 / 8)


@pytest.mark.parametrize("aggregator", ["mean", "byzantine_robust"])
@pytest.mark.parametrize("length", [0.0, 0.05, 0.5, 3.8])
def test_an_update_counts_by_what_it_adds_and_not_by_its_length(aggregator: str, length: float) -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(20, 400, generator=generator) + 0.7 * torch.randn(1, 400, generator=generator)
    values /= values.norm(dim=1, keepdim=True)
    values[7] *= length
    gram = GramMatrix.of(values, torch.ones(20))
    found = Pipeline.of(SoupRecipe(aggregator=aggregator)).plan(gram)
    combination, admitted = RoundWindow(8, [0] * 8).added(found, gram.norms())
    assert admitted[7] == pytest.approx(float(length > 0.0), abs=0.05)
    assert sum(admitted[:7]) == pytest.approx(7, abs=0.05)
    lengths = combination.matrix[0] * gram.norms()[:8]
    if aggregator == "byzantine_robust":
        assert float(lengths[7]) == pytest.approx(float(lengths[0]) if length else 0.0, rel=0.05)


def written(folder: Path, name: str, values: torch.Tensor, base: str) -> Path:
    path = folder / f"{name}.gymdelta"
    before = {"w.weight": torch.zeros(4, 64)}
    encode_delta({"w.weight": values}, before, DENSE, path, BaseSpec("tiny", base, SHAPES))
    return path


def test_four_fast_malicious_updates_in_a_round_of_eight_are_outvoted_by_the_window(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(4, 64, generator=generator)
    honest = [common + 0.5 * torch.randn(4, 64, generator=generator) for _ in range(16)]
    old, new = "sha256:" + "0" * 64, "sha256:" + "1" * 64
    own = [*(-common for _ in range(4)), *honest[:4]]
    paths = [written(tmp_path, f"own{i}", values, new if i else old) for i, values in enumerate(own)]
    rest = [written(tmp_path, f"rest{i}", values, old) for i, values in enumerate(honest[4:])]
    recipe = SoupRecipe(aggregator="byzantine_robust", num_malicious_nodes=4, codec=DENSE)
    spec = BaseSpec("tiny", new, SHAPES)
    updates = [DeltaFile.open(path, spec, any_version=True) for path in paths]
    others = [DeltaFile.open(path, spec, any_version=True) for path in rest]
    window = RoundWindow(8, [1, *[0] * 7], others, [1.0] * 12)
    report = merge(updates, [1.0] * 8, recipe, tmp_path / "soup.gymdelta", spec, window=window)
    with DeltaFile.open(tmp_path / "soup.gymdelta", spec) as soup:
        step = soup.decode("w.weight").flatten()
    for file in [*updates, *others]:
        file.close()
    assert report.admitted is not None
    assert sum(report.admitted[:4]) < 0.2 < 3 < sum(report.admitted[4:])
    assert float(torch.cosine_similarity(step, common.flatten(), 0)) > 0.9


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"soup": {"aggregator": "trimmed_mean"}}, "soup.aggregator"),
        ({"soup": {"aggregator": "fltrust"}, "root": {"data": "rows.jsonl"}}, "soup.aggregator"),
        ({"soup": {"weighting": "reputation", "reputation_floor": 0.1}}, "soup.weighting"),
        ({"secure_aggregation": {"threshold": 2, "step_norm": 0.1}}, "secure_aggregation"),
        ({"recipe": {"finetuning": "lora", "lora": {"freeze_a": True}}}, "recipe.lora.freeze_a"),
    ],
)
def test_a_setting_that_continuous_rounds_cannot_keep_is_refused(
    changes: dict[str, object], key: str
) -> None:
    with pytest.raises(ValueError, match=rf"rounds.mode: continuous: .*{key}"):
        ServerConfig.model_validate({"rounds": {"mode": "continuous"}, **changes})


def test_settings_of_continuous_rounds_are_refused_in_synchronous_ones() -> None:
    with pytest.raises(ValueError, match="merge_every has no effect on synchronous rounds"):
        ServerConfig.model_validate({"rounds": {"merge_every": 4}})
