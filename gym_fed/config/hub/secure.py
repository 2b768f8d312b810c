"""Refusals of a hub with secure aggregation, while the config is read, each with the setting to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from gym_fed.config.hub.sections import ServerSections
from gym_fed.config.schema.problems import Problem, Problems
from gym_fed.core.registries import AGGREGATORS


def wanted_participants(config: ServerSections) -> int:
    """Return the contributors that a secure round waits for before keys are shared."""
    secure = config.secure_aggregation
    assert secure is not None
    return secure.begin_with or needed_survivors(config)


def needed_survivors(config: ServerSections) -> int:
    """Return the contributors that must stay to the end."""
    secure = config.secure_aggregation
    assert secure is not None
    return max(secure.threshold, config.rounds.min_contributors)


def check_secure(config: ServerSections) -> None:
    """Raise ``Problems`` with every key that conflicts with ``secure_aggregation``."""
    if config.secure_aggregation is None:
        return
    problems = [*_about_rounds(config), *_about_updates(config), *_about_soup(config)]
    if problems:
        raise Problems("secure_aggregation", problems)


def _about_rounds(config: ServerSections) -> Iterator[Problem]:
    secure = config.secure_aggregation
    assert secure is not None
    begin, stay = wanted_participants(config), needed_survivors(config)
    if begin < stay:
        yield Problem(
            "secure_aggregation.begin_with",
            f"{begin} is fewer than must stay to the end, {stay}; raise it, by one for each contributor that may go",
        )
    if 2 * secure.threshold <= begin:
        yield Problem(
            "secure_aggregation.threshold",
            f"{secure.threshold} is not more than half of the {begin} with whom a round begins, so that a hub could "
            f"show two halves of them different participants; set it to at least {begin // 2 + 1}",
        )
    if config.privacy is None and secure.step_norm is None:
        yield Problem(
            "secure_aggregation.step_norm",
            "is missing: votes are signs, and it sets how far they move the model",
        )
    if config.privacy is not None and secure.step_norm is not None:
        yield Problem("secure_aggregation.step_norm", "is privacy.clipping_norm here; remove it")
    if config.privacy is not None and config.privacy.mechanism != "discrete_gaussian":
        yield Problem(
            "privacy.mechanism", "clips floats that the hub does not see; set it to discrete_gaussian"
        )


def _about_updates(config: ServerSections) -> Iterator[Problem]:
    if config.recipe.sends_factors:
        yield Problem(
            "recipe.finetuning",
            "lora: signs of a product of factors are no product of factors; set finetuning: full",
        )
    if config.admission.max_norm is not None:
        yield Problem("admission.max_norm", "measures single updates; set it to null")
    if config.admission.norm_ratio is not None:
        yield Problem("admission.norm_ratio", "compares single updates; set it to null")
    if config.gate.screen_updates:
        yield Problem(
            "gate.screen_updates", "tries single updates; set it to false (the gate still tries the soup)"
        )
    if config.root is not None:
        yield Problem("root", "judges single updates; remove it")
    yield from config.rewards.looks_into_updates("secure_aggregation")


def _about_soup(config: ServerSections) -> Iterator[Problem]:
    soup = config.soup
    if not AGGREGATORS.type_of(soup.aggregator).counts_votes:
        yield Problem(
            "soup.aggregator",
            f"{soup.aggregator!r} is no function of the sum; use {' or '.join(AGGREGATORS.own_with('counts_votes'))}",
        )
    if soup.pre_aggregators:
        yield Problem("soup.pre_aggregators", "compare single updates; remove them")
    if soup.max_norm is not None:
        yield Problem("soup.max_norm", "clips single updates, and votes all have one norm; remove it")
    if soup.weighting != "uniform":
        yield Problem("soup.weighting", f"{soup.weighting!r} multiplies single updates; set it to uniform")
    if soup.num_malicious_nodes:
        yield Problem(
            "soup.num_malicious_nodes",
            ": nobody can check what is under a mask, so one malicious client may move the sum at will; set it to 0",
        )
