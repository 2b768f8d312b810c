"""The goals that the ``train`` screen offers, with the algorithms that serve each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.errors import GymError
from gym_fed.core.registries import ALGORITHMS, GRADERS


@dataclass(frozen=True)
class Goal:
    """One purpose of training.

    Attributes:
        name: Identifier in the page.
        title: Title for display.
        help: The kind of rows that it needs, in one line.
        algorithms: Algorithms in order of preference; the first that reads the file's kind of rows is chosen.
        needs: Key that every row must have; empty for none.
    """

    name: str
    title: str
    help: str
    algorithms: tuple[str, ...]
    needs: str = ""

    def facts(self) -> dict[str, Any]:
        """Return the goal for pages, with the kind of rows that each algorithm reads."""
        algorithms = [{"name": name, "rows": ALGORITHMS.type_of(name).row_kind} for name in self.algorithms]
        return {
            "name": self.name,
            "title": self.title,
            "help": self.help,
            "algorithms": algorithms,
            "needs": self.needs,
            "graded": ALGORITHMS.type_of(self.algorithms[0]).needs_graders,
        }


GOALS = (
    Goal("answers", "Answers", "Questions or conversations, with the answers to give.", ("sft",)),
    Goal("style", "A style", "Texts in that style. All tokens are trained on.", ("pretrain",)),
    Goal(
        "preferences",
        "Preferences",
        "A better and a worse answer per prompt, or answers marked good or bad.",
        ("dpo", "kto"),
    ),
    Goal("tools", "Tools", "Conversations that call tools, with the tools' definitions.", ("sft",), "tools"),
    Goal("reward", "A reward", "Prompts. A grader scores the answers that the model writes.", ("grpo",)),
)


@cache
def graders() -> list[str]:
    """Return the names of graders that need no settings."""
    return [name for name in GRADERS.names() if _is_complete(name)]


def _is_complete(name: str) -> bool:
    try:
        GraderConfig.settings_of(name).model_validate({"grader": name})
    except (ValidationError, GymError):  # the grader has required settings, or its package is missing
        return False
    return True
