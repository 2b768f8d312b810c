"""Several graders as one: the sum of their values by weight; and the graders of a config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import GRADERS
from gym_fed.evaluation.graders.base import Grader, Sample

Range = tuple[float, float]


class CombinedGrader(Grader):
    """Calls every grader and adds up ``weight * value``.

    Args:
        graders: Each with its weight.
        name: Name of the sum in metrics.
        clips: Lowest and highest value of each grader before its weight; None leaves it as it is.
        clip: Lowest and highest sum.

    Attributes:
        values: What each grader returned when last called, by its name, neither clipped nor weighed.
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
                "give at least one, each with a name of its own",
            )
        self.name = name
        self.values: dict[str, list[float]] = {}
        self._parts = list(zip(graders, clips or [None] * len(graders), strict=True))
        self._clip = clip
        self._ready = ExitStack()

    def setup(self) -> None:
        """Set up every grader; when one fails, those before it are torn down again."""
        with ExitStack() as stack:
            for (grader, _), _ in self._parts:
                stack.callback(grader.teardown)
                grader.setup()
            self._ready = stack.pop_all()

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
        """Tear down every grader, the last first; errors are raised when all have been called."""
        self._ready.close()


def build_graders(entries: Sequence[GraderConfig]) -> list[Grader]:
    """A grader for each entry of ``config.graders``; their values add up to the reward, weights and clips included.

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
    """The values as floats, one a sample.

    Raises:
        GymError: ``DATA_INVALID`` for another number of values, or one that is not finite.
    """
    if len(values) != count:
        raise GymError(ErrorCode.DATA_INVALID, f"grader {name} gave {len(values)} values for {count} samples")
    numbers = [float(value) for value in values]
    for place, number in enumerate(numbers):
        if not math.isfinite(number):
            raise GymError(ErrorCode.DATA_INVALID, f"grader {name} gave {number} for sample {place + 1}")
    return numbers


def _clipped(value: float, clip: Range | None) -> float:
    return value if clip is None else min(max(value, clip[0]), clip[1])
