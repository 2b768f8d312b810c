"""A grader, a tracker, a format, a task and a check, as another package would bring them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from gym_fed.config.train.graders import GraderConfig
from gym_fed.data.formats.base import Format, string
from gym_fed.data.tasks.base import Task
from gym_fed.doctor.check import Check, Finding, Level
from gym_fed.evaluation.graders.base import Grader, Sample
from gym_fed.tracking.trackers.base import RunInfo, Tracker


class PoliteConfig(GraderConfig):
    """Keys of ``Polite``."""

    word: str = "please"
    least: int = Field(default=1, ge=1)


class Polite(Grader):
    """1 where a word is said often enough."""

    Settings = PoliteConfig
    config: PoliteConfig

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        return [float(s.completion.count(self.config.word) >= self.config.least) for s in samples]


class Plain(Grader):
    """Without settings of its own."""

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        return [0.5] * len(samples)


class Diary(Tracker):
    """Figures as lines of a text file."""

    def open(self, run: RunInfo) -> None:
        self._file = run.folder / "diary.txt"
        run.folder.mkdir(parents=True, exist_ok=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def close(self) -> None:
        """Nothing is in memory."""


class Cards(Format):
    """``{"front", "back"}``."""

    @classmethod
    def matches(cls, row: dict[str, Any]) -> bool:
        return row.keys() >= {"front", "back"}

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        turns = (("user", string(row, "front")), ("assistant", string(row, "back")))
        return {"messages": [{"role": role, "content": text} for role, text in turns]}

    def write(self, row: dict[str, Any]) -> dict[str, Any]:
        question, answer = row["messages"]
        return {"front": question["content"], "back": answer["content"]}


class Echo(Task):
    """A task that gym-nano has not seen."""

    summary = "the digit again: 'echo: 3' -> '3'"

    def make(self, rng: random.Random) -> tuple[str, str]:
        text = str(rng.randrange(10**6))
        return f"echo: {text}", text


class Tea(Check):
    """Whether there is tea."""

    def findings(self) -> Iterator[Finding]:
        yield Finding("tea", Level.WARN, "the pot is empty", "put the kettle on")
