"""The base class of graders."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.errors import ErrorCode, GymError


@dataclass(frozen=True)
class Sample:
    """One answer to be graded.

    Attributes:
        prompt: Messages, or plain text.
        completion: The answer as text, without special tokens.
        row: The other columns of the prompt's row (``answer``, ``tests``, ...).
    """

    prompt: list[dict[str, Any]] | str
    completion: str
    row: Mapping[str, Any] = field(default_factory=dict)

    def prompt_text(self) -> str:
        """Return the prompt as text: plain, or the contents of its messages separated by blank lines."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n\n".join(str(message.get("content") or "") for message in self.prompt)

    def column(self, name: str, grader: str) -> Any:
        """Return the row's value of ``name``.

        Raises:
            GymError: ``DATA_INVALID`` when the row has none, naming the grader.
        """
        value = self.row.get(name)
        if value is None:
            had = ", ".join(sorted(self.row)) or "no other columns"
            begins = self.prompt_text()[:60]
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"grader {grader}: a row has no {name!r} (it has: {had}); its prompt begins {begins!r}",
                f"give every row a column {name!r}, or set the grader's column",
            )
        return value


class Grader(ABC):
    """Scores samples, higher is better, for reinforcement learning and evaluation.

    Args:
        config: Its entry of ``graders``, of the type ``Settings``; None for one that is built in Python.
    """

    Settings: ClassVar[type[GraderConfig]] = GraderConfig
    """Validates the grader's entry in ``graders``."""

    config: GraderConfig

    name: str
    """Name of the reward in metrics."""

    def __init__(self, config: GraderConfig | None = None) -> None:
        if config is not None:
            self.config = config
            self.name = config.name or config.grader

    def setup(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Load models, open connections and check requirements. Called once before the first ``grade``.

        Raises:
            GymError: Naming what is missing.
        """

    @abstractmethod
    def grade(self, samples: Sequence[Sample]) -> list[float]:
        """Return one finite number per sample, in the same order.

        Raises:
            GymError: ``DATA_INVALID`` when a row lacks the column that this grader reads.
        """

    def teardown(self) -> None:  # noqa: B027 - most have nothing to close
        """Release what ``setup`` acquired. Called once, also after errors."""


def from_environment(variable: str | None, grader: str, key: str) -> str | None:
    """Return a secret from an environment variable; None if no variable is named.

    Raises:
        GymError: ``CONFIG_INVALID`` when it is named and not set.
    """
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"graders: {grader}: {key} names {variable}, which is not set",
            f"export {variable}=... before the run",
        )
    return value
