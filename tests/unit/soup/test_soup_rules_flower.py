"""Flower's strategies and ours on the same arrays: equal where both define a rule alike, and how not elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from flwr.serverapp import strategy

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.soup.building import build_aggregator
from tests.support.flower_replies import reply

ATTACKS = ["none", "far", "colluding"]


def round_of(attack: str, count: int, malicious: int, seed: int = 0) -> torch.Tensor:
    updates = torch.randn(count, 60, generator=torch.Generator().manual_seed(seed))
    if attack == "far":
        updates[:malicious] *= 50.0
    elif attack == "colluding":
        updates[:malicious] = -3.0 * updates[malicious:].mean(dim=0)
    return updates


def by_flower(updates: torch.Tensor, flower: Any, num_examples: Sequence[int] | None = None) -> torch.Tensor:
    """What a strategy makes of replies with these updates, each cut into two arrays."""
    replies = [
        reply({"a": update[:25].reshape(5, 5).numpy(), "b": update[25:].numpy()}, index + 1, examples)
        for index, (update, examples) in enumerate(
            zip(updates, num_examples or [1] * len(updates), strict=True)
        )
    ]
    arrays, _ = flower.aggregate_train(1, replies)
    assert arrays is not None
    return torch.cat([torch.tensor(arrays[key].numpy()).reshape(-1).float() for key in ("a", "b")])


def by_us(
    name: str, updates: torch.Tensor, malicious: int = 0, weights: torch.Tensor | None = None, **options: int
) -> torch.Tensor:
    recipe = SoupRecipe(aggregator=name, num_malicious_nodes=malicious, aggregator_options=dict(options))
    return build_aggregator(recipe).aggregate(
        updates, torch.ones(len(updates)) if weights is None else weights
    )


def equal(ours: torch.Tensor, flowers: torch.Tensor) -> None:
    torch.testing.assert_close(ours, flowers, rtol=1e-5, atol=1e-6)


def test_the_weighted_mean_is_fed_avg() -> None:
    updates, examples = round_of("none", 7, 0), [10, 20, 5, 1, 1, 40, 3]
    flowers = by_flower(updates, strategy.FedAvg(), examples)
    equal(by_us("weighted_mean", updates, weights=torch.tensor(examples, dtype=torch.float32)), flowers)
    equal(by_us("mean", updates), by_flower(updates, strategy.FedAvg()))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("count", [7, 8])
def test_the_median_is_fed_median(attack: str, count: int) -> None:
    updates = round_of(attack, count, 2)
    equal(by_us("median", updates, 2), by_flower(updates, strategy.FedMedian()))


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_trimmed_mean_is_fed_trimmed_avg(attack: str) -> None:
    """Flower is given the part to cut on either side, we the number."""
    updates = round_of(attack, 10, 2)
    equal(by_us("trimmed_mean", updates, 2), by_flower(updates, strategy.FedTrimmedAvg(beta=0.2)))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("count", "malicious"), [(7, 2), (10, 3), (20, 4)])
def test_krum_and_multi_krum_are_flowers(attack: str, count: int, malicious: int) -> None:
    updates = round_of(attack, count, malicious)
    equal(by_us("krum", updates, malicious), by_flower(updates, strategy.Krum(num_malicious_nodes=malicious)))
    flowers = strategy.MultiKrum(num_malicious_nodes=malicious, num_nodes_to_select=3)
    equal(by_us("multi_krum", updates, malicious, num_selected=3), by_flower(updates, flowers))


def test_flowers_multi_krum_weighs_what_it_selects_by_claimed_examples_and_ours_does_not() -> None:
    updates = round_of("none", 7, 2)
    flowers = strategy.MultiKrum(num_malicious_nodes=2, num_nodes_to_select=5)
    claimed = by_flower(updates, flowers, [1, 1, 1, 10_000, 1, 1, 1])
    assert float((claimed - by_us("multi_krum", updates, 2)).norm()) > 1.0


@pytest.mark.parametrize("attack", ATTACKS)
def test_bulyan_is_flowers_where_one_multi_krum_selects_as_repeated_krum_does(attack: str) -> None:
    """Without malicious clients both select every update and average all of them. With some, Flower selects by the
    scores of one round of Multi-Krum, the paper and we by a new Krum for every selection."""
    updates = round_of(attack, 12, 2)
    equal(by_us("bulyan", updates, 0), by_flower(updates, strategy.Bulyan(num_malicious_nodes=0)))

    def repeated_krum(contents: list[RecordDict], malicious: int, wanted: int) -> list[RecordDict]:
        left, selected = list(range(len(contents))), []
        rows = [np.concatenate([a.numpy().ravel() for a in c["arrays"].values()]) for c in contents]  # type: ignore[union-attr]
        squares = np.array([[float(np.sum((a - b) ** 2)) for b in rows] for a in rows])
        for _ in range(wanted):
            near = max(1, len(left) - malicious - 2)
            scores = [
                (sum(sorted(squares[i, j] for j in left if j != i)[:near]), squares[i, left].sum(), i)
                for i in left
            ]
            selected.append(min(scores)[2])
            left.remove(selected[-1])
        return [contents[i] for i in sorted(selected)]

    flowers = strategy.Bulyan(num_malicious_nodes=2, selection_rule=repeated_krum)
    equal(by_us("bulyan", updates, 2), by_flower(updates, flowers))
