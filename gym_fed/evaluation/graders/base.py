"""The base class of graders, functions that build them from a config or ``--grader``, and their weighted sum."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gym_fed.config.train.graders import GraderConfig, GraderSections
from gym_fed.config.yaml.file import validate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.plain_yaml import parse_value
from gym_fed.core.registries import GRADERS
from gym_fed.core.text import counted, plain


@dataclass(frozen=True)
class Sample:
    """One answer to be graded.

    Attributes:
        prompt: Messages, or plain text.
        completion: The answer as text, without special tokens.
        row: The other columns of the prompt's row (``answer``, ``tests``, ...).
        thought: The thought of a reasoning model before the answer, which graders and judges do not see.
    """

    prompt: list[dict[str, Any]] | str
    completion: str
    row: Mapping[str, Any] = field(default_factory=dict)
    thought: str = ""

    def prompt_text(self) -> str:
        """Return the prompt as text: plain, or the contents of its messages separated by blank lines."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n\n".join(str(message.get("content") or "") for message in self.prompt)

    def column(self, name: str, grader: str) -> Any:
        """Return the row's value in the column ``name``.

        Raises:
            GymError: ``DATA_INVALID`` naming the grader, if the row lacks the column.
        """
        value = self.row.get(name)
        if value is None:
            had = ", ".join(sorted(self.row)) or "none"
            begins = self.prompt_text()[:60]
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"grader {grader}: a row has no column {name!r} (columns: {had}); its prompt begins with {begins!r}",
                f"add a column {name!r} to every row, or set the grader's column",
            )
        return value


class Grader(ABC):
    """Scores samples for reinforcement learning and evaluation; higher is better.

    Args:
        config: The grader's entry in ``graders``, of type ``Settings``; None for a grader built in Python.
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
            GymError: Names the missing requirement.
        """

    @abstractmethod
    def grade(self, samples: Sequence[Sample]) -> list[float]:
        """Return one finite number per sample, in the same order.

        Raises:
            GymError: ``DATA_INVALID`` if a row lacks the column that this grader reads.
        """

    def teardown(self) -> None:  # noqa: B027 - most have nothing to close
        """Release what ``setup`` acquired. Called once, also after errors."""


def from_environment(variable: str | None, grader: str, key: str) -> str | None:
    """Return a secret from an environment variable; None if no variable is named.

    Raises:
        GymError: ``CONFIG_INVALID`` if it is named and not set.
    """
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"graders: {grader}: environment variable {variable} ({key}) is not set",
            f"export {variable}=... before the run",
        )
    return value


@contextmanager
def set_up(graders: Iterable[Grader]) -> Iterator[None]:
    """Set up graders for the block, and tear them down in reverse order, also those before one that fails."""
    with ExitStack() as stack:
        for grader in graders:
            stack.callback(grader.teardown)
            grader.setup()
        yield


_PLACE = "--grader:1:1: graders.0"
_SHOWN = 60

Range = tuple[float, float]


class CombinedGrader(Grader):
    """Calls every grader and returns the sum of ``weight * value``.

    Args:
        graders: The graders with their weights.
        name: Name of the sum in metrics.
        clips: Lowest and highest value of each grader before weighting; None for no limits.
        clip: Lowest and highest sum; None for no limits.

    Attributes:
        values: The last values of each grader by name, before weights and clips.
    """

    def __init__(
        self,
        graders: Sequence[tuple[Grader, float]],
        *,
        name: str = "combined",
        clips: Sequence[Range | None] | None = None,
        clip: Range | None = None,
    ) -> None:
        names = [grader.name for grader, _ in graders]
        if not names or len(set(names)) != len(names):
            raise GymError(
                ErrorCode.USAGE,
                f"CombinedGrader: graders {names}",
                "pass at least one, each with a different name",
            )
        self.name = name
        self.values: dict[str, list[float]] = {}
        self._parts = list(zip(graders, clips or [None] * len(graders), strict=True))
        self._clip = clip
        self._ready = ExitStack()

    def setup(self) -> None:
        """Set up every grader; if one fails, tear down those before it."""
        self._ready.enter_context(set_up(grader for (grader, _), _ in self._parts))

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        self.values = {}
        sums = [0.0] * len(samples)
        for (grader, weight), clip in self._parts:
            values = self.values[grader.name] = checked_values(
                grader.name, grader.grade(samples), len(samples)
            )
            for place, value in enumerate(values):
                sums[place] += weight * _clipped(value, clip)
        return [_clipped(value, self._clip) for value in sums]

    def teardown(self) -> None:
        """Tear down every grader in reverse order; errors are raised after all calls."""
        self._ready.close()


def build_graders(entries: Sequence[GraderConfig]) -> list[Grader]:
    """Build a grader for each entry of ``config.graders``, with its weight and clip. The reward is the sum of their
    values.

    Raises:
        GymError: ``CONFIG_INVALID`` for an entry that cannot be honoured.
    """
    built: list[Grader] = []
    for entry in entries:
        grader: Grader = GRADERS.type_of(entry.grader)(entry)
        if entry.weight != 1 or entry.clip is not None:
            grader = CombinedGrader([(grader, entry.weight)], name=grader.name, clips=[entry.clip])
        built.append(grader)
    return built


def checked_values(name: str, values: Sequence[float], count: int) -> list[float]:
    """Return the values as floats, one per sample.

    Raises:
        GymError: ``DATA_INVALID`` for a wrong number of values, or a value that is not finite.
    """
    if len(values) != count:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"grader {name} returned {counted(len(values), 'value')} for {count} samples",
        )
    numbers = [float(value) for value in values]
    for place, number in enumerate(numbers):
        if not math.isfinite(number):
            raise GymError(ErrorCode.DATA_INVALID, f"grader {name} returned {number} for sample {place + 1}")
    return numbers


def _clipped(value: float, clip: Range | None) -> float:
    return value if clip is None else min(max(value, clip[0]), clip[1])


def graders_named(texts: Sequence[str]) -> list[GraderConfig]:
    """Parse values of ``--grader``.

    Args:
        texts: Each a grader's name, or ``NAME:{key: value}`` with the keys of a config's ``graders`` entry.

    Raises:
        GymError: ``CONFIG_INVALID`` for an unknown grader or wrong settings; ``USAGE`` for text in neither form, and
            for two graders with the same name.
    """
    graders = [_parsed(text) for text in texts]
    names = [entry.name or entry.grader for entry in graders]
    if twice := [name for name in names if names.count(name) > 1]:
        raise GymError(
            ErrorCode.USAGE,
            f"--grader: two graders are called {twice[0]!r}",
            f"rename one of them, such as --grader '{twice[0]}:{{name: second}}'",
        )
    return graders


def _parsed(text: str) -> GraderConfig:
    name, colon, raw = text.partition(":")
    form = f"write --grader NAME, or --grader 'NAME:{{key: value}}' (got {plain(text, _SHOWN)})"
    try:
        settings = parse_value(raw) if colon else {}
    except ValueError as error:
        raise GymError(ErrorCode.USAGE, f"--grader {plain(name, _SHOWN)}: {error}", form) from error
    if not isinstance(settings, dict) or not name.strip():
        raise GymError(ErrorCode.USAGE, f"--grader {plain(text, _SHOWN)}: settings are not a mapping", form)
    values = {"graders": [{**settings, "grader": name.strip()}]}
    try:
        return validate(values, GraderSections, "--grader", resolve_aliases=False).graders[0]
    except GymError as error:
        place = f"--grader {plain(name, _SHOWN)}"
        message = error.message.replace(f"{_PLACE}.grader", place).replace(_PLACE, place)
        raise GymError(error.code, message, error.hint) from error
