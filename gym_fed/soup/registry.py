"""The one registry of rules: every file of ``aggregators``, ``pre_aggregators``, ``methods`` and ``optimizers`` is a
member."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import TypeVar

from gym_fed.config.soup import SoupRecipe
from gym_fed.config.yaml_file import validate
from gym_fed.errors import ErrorCode, GymError
from gym_fed.soup.aggregator import Aggregator
from gym_fed.soup.method import MergeMethod
from gym_fed.soup.optimizer import ServerOptimizer
from gym_fed.soup.pre_aggregator import PreAggregator
from gym_fed.soup.rule import Rule

R = TypeVar("R", bound=Rule)


def aggregator_names() -> tuple[str, ...]:
    """Names of all aggregators, sorted."""
    return tuple(sorted(_members("aggregators")))


def pre_aggregator_names() -> tuple[str, ...]:
    """Names of all pre-aggregators, sorted."""
    return tuple(sorted(_members("pre_aggregators")))


def method_names() -> tuple[str, ...]:
    """Names of all merge methods, sorted."""
    return tuple(sorted(_members("methods")))


def get_aggregator(name: str) -> type[Aggregator]:
    """The class of an aggregator.

    Raises:
        GymError: ``CONFIG_INVALID`` when there is none of that name; so with the two below.
    """
    return _get("aggregators", name, Aggregator)  # type: ignore[type-abstract]


def get_pre_aggregator(name: str) -> type[PreAggregator]:
    """The class of a pre-aggregator."""
    return _get("pre_aggregators", name, PreAggregator)  # type: ignore[type-abstract]


def get_method(name: str) -> type[MergeMethod]:
    """The class of a merge method."""
    return _get("methods", name, MergeMethod)  # type: ignore[type-abstract]


def optimizer_names() -> tuple[str, ...]:
    """Names of all server optimisers, sorted."""
    return tuple(sorted(_members("optimizers")))


def get_optimizer(name: str) -> type[ServerOptimizer]:
    """The class of a server optimiser; ``CONFIG_INVALID`` as above."""
    return _get("optimizers", name, ServerOptimizer)  # type: ignore[type-abstract]


def build_aggregator(recipe: SoupRecipe) -> Aggregator:
    """The aggregator a recipe asks for, with its settings.

    Raises:
        GymError: ``CONFIG_INVALID`` for settings the rule does not have; so with the next.
    """
    values = {"num_malicious_nodes": recipe.num_malicious_nodes, **recipe.aggregator_options}
    return build(get_aggregator(recipe.aggregator), values, "aggregator_options")


def build_pre_aggregators(recipe: SoupRecipe) -> tuple[PreAggregator, ...]:
    """The pre-aggregators a recipe asks for, in their order."""
    return tuple(
        build(
            get_pre_aggregator(name),
            {
                "num_malicious_nodes": recipe.num_malicious_nodes,
                **recipe.pre_aggregator_options.get(name, {}),
            },
            "pre_aggregator_options",
        )
        for name in recipe.pre_aggregators
    )


def build_optimizer(recipe: SoupRecipe) -> ServerOptimizer | None:
    """The server optimiser a recipe asks for, if any."""
    if recipe.server_optimizer == "none":
        return None
    return build(
        get_optimizer(recipe.server_optimizer), recipe.server_optimizer_options, "server_optimizer_options"
    )


def build(rule: type[R], values: Mapping[str, object], where: str) -> R:
    """A rule from plain values.

    Raises:
        GymError: ``CONFIG_INVALID`` naming the key.
    """
    return rule(validate(dict(values), rule.Config, f"{where} of {rule.name!r}"))


def _get(folder: str, name: str, kind: type[R]) -> type[R]:
    found = _members(folder).get(name)
    if found is None:
        known = ", ".join(sorted(_members(folder)))
        noun = folder.removesuffix("s").replace("_", "-")
        raise GymError(ErrorCode.CONFIG_INVALID, f"unknown {noun} {name!r} (known: {known})")
    assert issubclass(found, kind)
    return found


@functools.cache
def _members(folder: str) -> dict[str, type[Rule]]:
    package = importlib.import_module(f"gym_fed.soup.{folder}")
    found: dict[str, type[Rule]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for _, member in inspect.getmembers(module, inspect.isclass):
            if issubclass(member, Rule) and member.__module__ == module.__name__:
                if member.name != info.name:
                    raise TypeError(f"{module.__file__}: the rule is called {member.name!r}, unlike its file")
                found[member.name] = member
    return found
