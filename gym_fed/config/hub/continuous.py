"""Refuse settings that do not work in continuous rounds (``rounds.mode``), with the reasons."""

from __future__ import annotations

from collections.abc import Iterator

from gym_fed.config.hub.sections import ServerSections
from gym_fed.config.schema.base import Problem, Problems
from gym_fed.core.registries import AGGREGATORS, PRE_AGGREGATORS


def check_continuous(config: ServerSections) -> None:
    """Raise ``Problems`` with every key that conflicts with ``rounds.mode: continuous``."""
    if config.rounds.mode != "continuous":
        return
    problems = list(_problems(config))
    if problems:
        raise Problems("rounds.mode: continuous", problems)


def _problems(config: ServerSections) -> Iterator[Problem]:
    soup = config.soup
    if config.secure_aggregation is not None:
        yield Problem(
            "secure_aggregation",
            "needs rounds in which all contributors start together; set rounds.mode: synchronous",
        )
    if config.privacy is not None:
        yield Problem(
            "privacy",
            "assumes random samples of contributors, but the order of arrival is not random; set "
            "rounds.mode: synchronous",
        )
    if config.rounds.audit is not None:
        yield Problem(
            "rounds.audit",
            "draws steps of one task, but a continuous round has updates of several; remove it, or set rounds.mode: "
            "synchronous",
        )
    if not AGGREGATORS.type_of(soup.aggregator).weighs_windows():
        yield Problem(
            "soup.aggregator",
            f"{soup.aggregator!r} cannot weigh updates of earlier rounds; use byzantine_robust, or another rule that "
            "weighs whole updates and needs no root update",
        )
    elif config.root is not None:
        yield Problem(
            "root",
            "judges updates of one version, but a continuous round has updates of several; remove root, or "
            "set rounds.mode: synchronous",
        )
    for name in soup.pre_aggregators:
        if PRE_AGGREGATORS.type_of(name).needs_root():
            yield Problem("soup.pre_aggregators", f"{name!r} needs a root update; remove it")
    if soup.weighting == "reputation":
        yield Problem("soup.weighting", "'reputation' needs synchronous rounds; set it to uniform")
    if config.recipe.sends_factors and config.recipe.lora.freeze_a:
        yield Problem(
            "recipe.lora.freeze_a",
            "draws a new A for each round, but updates of several rounds are added together; set it to false",
        )
