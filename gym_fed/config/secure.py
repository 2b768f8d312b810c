"""What a hub that aggregates securely cannot do, refused where the config is read, each with what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gym_fed.config.server import ServerConfig

AGGREGATORS = ("mean", "majority_vote")


def beginners(config: ServerConfig) -> int:
    """Contributors that a secure round waits for before keys are shared."""
    secure = config.secure_aggregation
    assert secure is not None
    return secure.begin_with or stayers(config)


def stayers(config: ServerConfig) -> int:
    """Contributors that must stay to the end."""
    secure = config.secure_aggregation
    assert secure is not None
    return max(secure.threshold, config.rounds.min_contributors)


def check_secure(config: ServerConfig) -> None:
    """Raises ``ValueError`` with every key that does not go with ``secure_aggregation``."""
    if config.secure_aggregation is None:
        return
    problems = [*_about_rounds(config), *_about_updates(config), *_about_soup(config)]
    if problems:
        raise ValueError("secure_aggregation hides every update from this hub: " + "; ".join(problems))


def _about_rounds(config: ServerConfig) -> Iterator[str]:
    secure = config.secure_aggregation
    assert secure is not None
    begin, stay = beginners(config), stayers(config)
    if begin < stay:
        yield (
            f"begin_with {begin} is fewer than must stay to the end, {stay}; raise it, by one for each contributor "
            "that may go"
        )
    if 2 * secure.threshold <= begin:
        yield (
            f"threshold {secure.threshold} is not more than half of the {begin} with whom a round begins, so that a "
            f"hub could tell two halves of them different stories; set it to at least {begin // 2 + 1}"
        )
    if config.privacy is None and secure.step_norm is None:
        yield "step_norm is missing: votes are signs, and it says how far they move the model"
    if config.privacy is not None and secure.step_norm is not None:
        yield "step_norm is privacy.clipping_norm here; remove it"
    if config.privacy is not None and config.privacy.mechanism != "discrete_gaussian":
        yield "privacy.mechanism clips floats that the hub does not see; set it to discrete_gaussian"


def _about_updates(config: ServerConfig) -> Iterator[str]:
    if config.recipe.finetuning == "lora":
        yield (
            "recipe.finetuning lora: signs of a product of factors are no product of factors; set finetuning: full"
        )
    if config.admission.max_norm is not None:
        yield "admission.max_norm measures single updates; set it to null"
    if config.admission.norm_ratio is not None:
        yield "admission.norm_ratio compares single updates; set it to null"
    if config.gate.screen_updates:
        yield "gate.screen_updates tries single updates; set it to false (the gate still tries the soup)"
    if config.root is not None:
        yield "root judges single updates; remove it"
    try:
        config.rewards.refuse_hidden("secure_aggregation")
    except ValueError as error:
        yield str(error)


def _about_soup(config: ServerConfig) -> Iterator[str]:
    soup = config.soup
    if soup.aggregator not in AGGREGATORS:
        yield f"soup.aggregator {soup.aggregator!r} is no function of the sum; use {' or '.join(AGGREGATORS)}"
    if soup.pre_aggregators:
        yield "soup.pre_aggregators compare single updates; remove them"
    if soup.max_norm is not None:
        yield "soup.max_norm clips single updates, and votes all have one norm; remove it"
    if soup.weighting != "uniform":
        yield f"soup.weighting {soup.weighting!r} multiplies single updates; set it to uniform"
    if soup.num_malicious_nodes:
        yield (
            "soup.num_malicious_nodes: nobody can check what is under a mask, so one liar may move the sum as it "
            "likes; set it to 0"
        )
