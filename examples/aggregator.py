"""An aggregator of your own: the mean of the middle half of every coordinate, tried against two attackers.

    python examples/aggregator.py       # seconds

As a package with an entry point it is a word of `gym-server.yaml`: docs/extending.md, which has a codec, too.
"""

import torch
from torch import Tensor

from gym_fed.soup.aggregator import CoordinateRule
from gym_fed.soup.aggregators.mean import Mean
from gym_fed.soup.rule import RuleConfig


class InterquartileMean(CoordinateRule):
    """A quarter of the values of each coordinate is left out on either side."""

    name = "interquartile_mean"
    robust = True

    @classmethod
    def minimum(cls, malicious: int) -> int:
        """A quarter may be malicious."""
        return max(1, 4 * malicious)

    def formula(self, updates: Tensor, weights: Tensor) -> Tensor:
        drop = len(updates) // 4
        return updates.sort(dim=0).values[drop : len(updates) - drop].mean(dim=0)


generator = torch.Generator().manual_seed(0)
truth = torch.randn(10_000, generator=generator)
updates = truth + 0.1 * torch.randn(10, 10_000, generator=generator)
updates[:2] = -20 * truth  # two of ten want the opposite
weights = torch.ones(10)

rules = (Mean(RuleConfig()), InterquartileMean(RuleConfig(num_malicious_nodes=2)))
for rule in rules:
    merged = rule.aggregate(updates, weights)
    error = float((merged - truth).norm() / truth.norm())
    print(f"{rule.name:20} off by {error:.1%}")
