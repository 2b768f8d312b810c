"""Build the rules that a recipe names, with their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from gym_fed.config.yaml.file import validate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import AGGREGATORS, CONTRIBUTIONS, METHODS, PRE_AGGREGATORS, SERVER_OPTIMIZERS
from gym_fed.soup.contribution import ContributionMethod
from gym_fed.soup.rule import Rule

if TYPE_CHECKING:
    from gym_fed.config.hub.soup import SoupRecipe
    from gym_fed.soup.aggregator import Aggregator
    from gym_fed.soup.optimizer import ServerOptimizer
    from gym_fed.soup.pre_aggregator import PreAggregator

R = TypeVar("R", bound=Rule)


def build_aggregator(recipe: SoupRecipe) -> Aggregator:
    """Build the aggregator of a recipe.

    Raises:
        GymError: ``CONFIG_INVALID`` for settings that the rule does not have.
    """
    values = {"num_malicious_nodes": recipe.num_malicious_nodes, **recipe.aggregator_options}
    rule: type[Aggregator] = AGGREGATORS.type_of(recipe.aggregator)
    return build(rule, values, "aggregator_options")


def build_pre_aggregators(recipe: SoupRecipe) -> tuple[PreAggregator, ...]:
    """Build the pre-aggregators of a recipe, in order."""

    def one(name: str) -> PreAggregator:
        rule: type[PreAggregator] = PRE_AGGREGATORS.type_of(name)
        values = {
            "num_malicious_nodes": recipe.num_malicious_nodes,
            **recipe.pre_aggregator_options.get(name, {}),
        }
        return build(rule, values, "pre_aggregator_options")

    return tuple(map(one, recipe.pre_aggregators))


def build_optimizer(recipe: SoupRecipe) -> ServerOptimizer | None:
    """Build the server optimiser of a recipe, if it has one."""
    if recipe.server_optimizer == "none":
        return None
    rule: type[ServerOptimizer] = SERVER_OPTIMIZERS.type_of(recipe.server_optimizer)
    return build(rule, recipe.server_optimizer_options, "server_optimizer_options")


def build_contribution_method(name: str, options: Mapping[str, object]) -> ContributionMethod:
    """Build a contribution score from plain values.

    Raises:
        GymError: ``CONFIG_INVALID`` for an unknown score or invalid settings.
    """
    method: type[ContributionMethod] = CONTRIBUTIONS.type_of(name)
    return method(validate(dict(options), method.Config, f"score_options of {name!r}"))


def build(rule: type[R], values: Mapping[str, object], where: str) -> R:
    """Build a rule from plain values.

    Raises:
        GymError: ``CONFIG_INVALID`` with the invalid key.
    """
    return rule(validate(dict(values), rule.Config, f"{where} of {rule.name!r}"))


def is_method(name: str) -> bool:
    """Return True if ``name`` is a merge method, False if it is an aggregator.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` if it is both, because an installed package uses the name too.
    """
    both = name in METHODS and name in AGGREGATORS
    if both:
        foreign = METHODS if METHODS.origin(name) is not None else AGGREGATORS
        origin = foreign.origin(name)
        whose = origin.distribution if origin is not None else "gym-fed"
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"{name!r} is both an aggregator and a merge method; the {foreign.kind} is from {whose}",
            f"remove {whose}, or rename its {foreign.kind}",
        )
    return name in METHODS
