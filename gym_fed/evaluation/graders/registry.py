"""Finds graders by file name and builds those of a config."""

from __future__ import annotations

from collections.abc import Sequence

from gym_fed.config.rewards import AnyGraderConfig
from gym_fed.evaluation.graders._combined import CombinedGrader
from gym_fed.evaluation.graders.base import Grader
from gym_fed.training.registry import Registry

_GRADERS: Registry[Grader] = Registry("gym_fed.evaluation.graders", "rewards[].grader")


def grader_names() -> list[str]:
    """The values that ``rewards[].grader`` may have, in alphabetical order."""
    return _GRADERS.names()


def build_graders(rewards: Sequence[AnyGraderConfig]) -> list[Grader]:
    """A grader for each entry of ``config.rewards``; their values add up to the reward, weights and clips included.

    Raises:
        GymError: ``CONFIG_INVALID`` for an entry that cannot be honoured.
    """
    built: list[Grader] = []
    for entry in rewards:
        grader: Grader = _GRADERS.type_of(entry.grader, Grader)(entry)
        if entry.weight != 1 or entry.clip is not None:
            grader = CombinedGrader([(grader, entry.weight)], name=grader.name, clips=[entry.clip])
        built.append(grader)
    return built
