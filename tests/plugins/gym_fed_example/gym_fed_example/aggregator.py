"""``example_middle``: at each coordinate half way between the smallest and the largest value."""

from __future__ import annotations

from torch import Tensor

from gym_fed.soup.aggregator import CoordinateRule


class ExampleMiddle(CoordinateRule):
    name = "example_middle"
    robust = False

    def _aggregate(self, updates: Tensor, weights: Tensor) -> Tensor:
        return (updates.amin(dim=0) + updates.amax(dim=0)) / 2
