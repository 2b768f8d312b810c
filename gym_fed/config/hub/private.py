"""Refusals of a hub with differential privacy: settings that would reveal an update in spite of the noise.

Each is refused where the config is read, with the reason and with what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from gym_fed.config.hub.sections import ServerSections
from gym_fed.config.schema.problems import Problem, Problems
from gym_fed.core.registries import AGGREGATORS


def check_private(config: ServerSections) -> None:
    """Raises ``Problems`` with every key that does not go with ``privacy``."""
    if config.privacy is None:
        return
    problems = list(_problems(config))
    if problems:
        raise Problems("privacy", problems)


def _problems(config: ServerSections) -> Iterator[Problem]:
    if config.admission.norm_ratio is not None:
        yield Problem(
            "admission.norm_ratio",
            "rejects an update by the norms of all, and who is rejected is seen; write admission: {norm_ratio: null} "
            "(privacy.clipping_norm limits what one can do)",
        )
    if config.admission.max_norm is not None:
        yield Problem("admission.max_norm", "refuses by an update's norm; write admission: {max_norm: null}")
    if config.gate.screen_updates:
        yield Problem(
            "gate.screen_updates",
            "rejects by what single updates do to the held-out loss; write gate: {screen_updates: false} (the gate "
            "still tries the soup, which is noised)",
        )
    rule = AGGREGATORS.type_of(config.soup.aggregator)
    if config.root is not None and not (rule.bounds_one and rule.needs_root()):
        yield Problem(
            "root",
            f"{config.soup.aggregator} does not judge each update against the root update by itself; remove it, or "
            "write soup: {aggregator: root_gate}, which does",
        )
    if config.recipe.sends_factors and not config.recipe.lora.freeze_a:
        yield Problem(
            "recipe.finetuning",
            "lora trains two factors, and noise on both is multiplied with itself; write recipe: {lora: {freeze_a: "
            "true}}, or finetuning: full",
        )
    yield from config.rewards.looks_into_updates("privacy")
    assert config.privacy is not None
    yield from config.privacy.unaccounted(config.soup)
