"""The recipe: what it refuses when it is read, and the rules' own settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.config.yaml.file import dump_yaml, load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import AGGREGATORS
from gym_fed.soup.building import build_aggregator


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "aggregator: krumm",
            "unknown aggregator 'krumm'; did you mean 'krum'? (known: bulyan, byzantine_evidence, byzantine_robust",
        ),
        ("weighting: num_examples", "num_examples_cap is required for weighting: num_examples"),
        (
            "num_examples_cap: 10",
            "num_examples_cap is required for weighting: num_examples, and not allowed otherwise",
        ),
        ("max_norm: 0", "max_norm: Input should be greater than 0"),
        ("server_learning_rate: -1", "server_learning_rate"),
        ("server_learning_rate: .nan", "server_learning_rate"),
        ("num_malicious_nodes: -1", "num_malicious_nodes"),
        (
            "codec: {max_bits_per_weight: 1.0, error_feedback: false}",
            "max_bits_per_weight leaves tensors out of the file",
        ),
        ("max_nrom: 3", "did you mean 'max_norm'?"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_at_its_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "soup.yaml").write_text(text)
    with pytest.raises(GymError) as caught:
        load_config(tmp_path / "soup.yaml", SoupRecipe)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert message in caught.value.message
    assert f"{tmp_path / 'soup.yaml'}:1:" in caught.value.message


def test_a_recipe_survives_yaml(tmp_path: Path) -> None:
    recipe = SoupRecipe(
        aggregator="trimmed_mean",
        aggregator_options={"trim": 3},
        num_malicious_nodes=2,
        weighting="num_examples",
        num_examples_cap=500,
        max_norm=2.5,
    )
    (tmp_path / "soup.yaml").write_text(dump_yaml(recipe))
    assert load_config(tmp_path / "soup.yaml", SoupRecipe) == recipe


def test_every_registered_rule_can_be_named_in_a_recipe() -> None:
    for name in AGGREGATORS.names():
        assert build_aggregator(SoupRecipe(aggregator=name)).name == name


def test_a_round_needs_two_malicious_clients_and_one_more() -> None:
    recipe = SoupRecipe(aggregator="median", num_malicious_nodes=2)
    recipe.check_feasible(5)
    with pytest.raises(GymError, match="num_malicious_nodes: 2 needs at least 5 updates a round, not 4"):
        recipe.check_feasible(4)


def test_nobody_counts_for_more_examples_than_the_cap() -> None:
    assert SoupRecipe().weights([5, 10_000]) == [1.0, 1.0]
    capped = SoupRecipe(weighting="num_examples", num_examples_cap=100)
    assert capped.weights([5, 10_000, 0]) == [5.0, 100.0, 1.0]


def test_the_trim_is_the_number_of_malicious_clients_and_never_less() -> None:
    rows = torch.tensor([[0.0], [1.0], [2.0], [10.0], [100.0]])
    two = build_aggregator(SoupRecipe(aggregator="trimmed_mean", num_malicious_nodes=2))
    assert two.aggregate(rows, torch.ones(5)).tolist() == [2.0]
    wider = SoupRecipe(aggregator="trimmed_mean", aggregator_options={"trim": 2}, num_malicious_nodes=1)
    assert build_aggregator(wider).aggregate(rows, torch.ones(5)).tolist() == [2.0]
    narrow = SoupRecipe(aggregator="trimmed_mean", aggregator_options={"trim": 0}, num_malicious_nodes=1)
    with pytest.raises(GymError, match="trim 0 is below num_malicious_nodes 1") as caught:
        build_aggregator(narrow)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_a_trim_that_leaves_nothing_is_refused() -> None:
    rule = build_aggregator(SoupRecipe(aggregator="trimmed_mean", aggregator_options={"trim": 2}))
    with pytest.raises(GymError, match="trim 2 leaves none of 4 updates"):
        rule.aggregate(torch.ones(4, 1), torch.ones(4))


def test_a_trimmed_mean_weighs_what_remains() -> None:
    rule = build_aggregator(SoupRecipe(aggregator="trimmed_mean", num_malicious_nodes=1))
    rows = torch.tensor([[-50.0], [1.0], [2.0], [90.0]])
    assert rule.aggregate(rows, torch.tensor([9.0, 1.0, 3.0, 9.0])).tolist() == [1.75]


def test_the_weighted_median_is_where_half_the_weight_lies() -> None:
    rule = build_aggregator(SoupRecipe(aggregator="median"))
    rows = torch.tensor([[3.0], [1.0], [2.0], [4.0]])
    assert rule.aggregate(rows, torch.ones(4)).tolist() == [2.5]
    assert rule.aggregate(rows, torch.tensor([1.0, 1.0, 1.0, 4.0])).tolist() == [4.0]
    assert rule.aggregate(rows, torch.tensor([1.0, 1.0, 1.0, 3.0])).tolist() == [3.5]


def test_malicious_clients_who_hold_half_of_the_weight_are_refused_a_median() -> None:
    rule = build_aggregator(SoupRecipe(aggregator="median", num_malicious_nodes=1))
    with pytest.raises(GymError, match="at least half of the weight") as caught:
        rule.aggregate(torch.ones(3, 1), torch.tensor([1.0, 1.0, 2.0]))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
