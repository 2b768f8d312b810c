"""What every aggregation rule promises, and the registry that finds the files of ``aggregators``."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from abc import ABC, abstractmethod
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

import gym_fed.soup.aggregators
from gym_fed.config.base import StrictModel
from gym_fed.config.soup import SoupRecipe
from gym_fed.config.yaml_file import validate
from gym_fed.errors import ErrorCode, GymError


class AggregatorConfig(StrictModel):
    """What every rule knows; a rule with settings of its own derives from this."""

    num_malicious_nodes: Annotated[int, Field(ge=0)] = 0
    """Liars to withstand, f."""


class Aggregator(ABC):
    """One rule. Works on a block of coordinates at a time, so it must treat each coordinate alone.

    To add one, put a file with a subclass into ``gym_fed/soup/aggregators``, named like the rule.
    """

    name: ClassVar[str]
    robust: ClassVar[bool]
    """Whether f liars among 2f + 1 cannot move a coordinate beyond what honest contributors sent."""

    Config: ClassVar[type[AggregatorConfig]] = AggregatorConfig

    def __init__(self, config: AggregatorConfig) -> None:
        self.config = config

    def aggregate(self, updates: Tensor, weights: Tensor) -> Tensor:
        """Merge.

        Args:
            updates: ``[n, d]`` float32, a row for each contributor.
            weights: ``[n]`` float32, positive; only their ratios matter.

        Returns:
            ``[d]`` float32.

        Raises:
            GymError: ``UPDATE_REFUSED`` for values that are not finite, ``USAGE`` for shapes or weights that
                do not fit, and what ``check`` raises.
        """
        if updates.dim() != 2 or weights.shape != updates.shape[:1]:
            raise GymError(
                ErrorCode.USAGE, f"updates {list(updates.shape)} and weights {list(weights.shape)} do not fit"
            )
        self.check(weights)
        finite = torch.isfinite(updates).all(dim=1)
        if not bool(finite.all()):
            culprit = int((~finite).nonzero()[0, 0])
            raise GymError(ErrorCode.UPDATE_REFUSED, f"update {culprit} holds values that are not finite")
        return self._aggregate(updates.to(torch.float32), weights.to(torch.float32))

    def check(self, weights: Tensor) -> None:
        """Refuse a round in which the rule could not keep its promise.

        Raises:
            GymError: ``CONFIG_INVALID``, or ``USAGE`` for weights that are not positive.
        """
        if weights.numel() == 0 or not bool((torch.isfinite(weights) & (weights > 0)).all()):
            raise GymError(ErrorCode.USAGE, f"weights {weights.tolist()} are not all positive and finite")
        malicious, count = self.config.num_malicious_nodes, weights.numel()
        if malicious and not self.robust:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"aggregator {self.name!r} withstands no liar, but num_malicious_nodes is {malicious}",
                "choose a robust aggregator such as trimmed_mean",
            )
        if count < 2 * malicious + 1:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"{count} updates cannot outvote num_malicious_nodes: {malicious}, "
                f"which takes {2 * malicious + 1}",
                "wait for more contributors",
            )

    @abstractmethod
    def _aggregate(self, updates: Tensor, weights: Tensor) -> Tensor:
        """The rule itself, on checked input; may not change it, nor depend on the number of torch threads."""


def aggregator_names() -> tuple[str, ...]:
    """Names of all rules, sorted."""
    return tuple(sorted(_aggregators()))


def get_aggregator(name: str) -> type[Aggregator]:
    """The class of a rule.

    Raises:
        GymError: ``CONFIG_INVALID`` when there is none of that name.
    """
    try:
        return _aggregators()[name]
    except KeyError:
        known = ", ".join(aggregator_names())
        raise GymError(ErrorCode.CONFIG_INVALID, f"unknown aggregator {name!r} (known: {known})") from None


def build_aggregator(recipe: SoupRecipe) -> Aggregator:
    """The rule a recipe asks for, with its settings.

    Raises:
        GymError: ``CONFIG_INVALID`` for settings the rule does not have.
    """
    rule = get_aggregator(recipe.aggregator)
    values = {"num_malicious_nodes": recipe.num_malicious_nodes, **recipe.aggregator_options}
    return rule(validate(values, rule.Config, f"aggregator_options of {recipe.aggregator!r}"))


@functools.cache
def _aggregators() -> dict[str, type[Aggregator]]:
    found: dict[str, type[Aggregator]] = {}
    for info in pkgutil.iter_modules(gym_fed.soup.aggregators.__path__):
        module = importlib.import_module(f"gym_fed.soup.aggregators.{info.name}")
        for _, member in inspect.getmembers(module, inspect.isclass):
            if issubclass(member, Aggregator) and member.__module__ == module.__name__:
                if member.name != info.name:
                    raise TypeError(f"{module.__file__}: the rule is called {member.name!r}, unlike its file")
                found[member.name] = member
    return found
