"""The registry of contribution methods: every file of ``contributions`` is a member."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Mapping

from gym_fed.config.yaml_file import validate
from gym_fed.errors import ErrorCode, GymError
from gym_fed.soup.contribution import ContributionMethod


def contribution_method_names() -> tuple[str, ...]:
    """Names of all methods, sorted."""
    return tuple(sorted(_members()))


def get_contribution_method(name: str) -> type[ContributionMethod]:
    """The class of a method.

    Raises:
        GymError: ``CONFIG_INVALID`` when there is none of that name.
    """
    found = _members().get(name)
    if found is None:
        known = ", ".join(contribution_method_names())
        raise GymError(ErrorCode.CONFIG_INVALID, f"unknown contribution method {name!r} (known: {known})")
    return found


def build_contribution_method(name: str, options: Mapping[str, object]) -> ContributionMethod:
    """A method from plain values.

    Raises:
        GymError: ``CONFIG_INVALID`` naming the key.
    """
    method = get_contribution_method(name)
    return method(validate(dict(options), method.Config, f"score_options of {name!r}"))


@functools.cache
def _members() -> dict[str, type[ContributionMethod]]:
    package = importlib.import_module("gym_fed.soup.contributions")
    found: dict[str, type[ContributionMethod]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for _, member in inspect.getmembers(module, inspect.isclass):
            if issubclass(member, ContributionMethod) and member.__module__ == module.__name__:
                if member.name != info.name:
                    raise TypeError(
                        f"{module.__file__}: the method is called {member.name!r}, unlike its file"
                    )
                found[member.name] = member
    return found
