"""The registry of suites, tasks and data sets in ``assets/suites/registry.yaml``. Has no heavy imports."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError

ASSETS = Path(__file__).parents[2] / "assets" / "suites"


class Suite(StrictModel):
    """Tasks that are run together."""

    about: str
    """What it measures."""

    tasks: list[str] = Field(min_length=1)
    """Names of tasks and groups."""


class MetricNeeds(StrictModel):
    """Requirements of a task's metric beyond the extra ``eval``, which it would otherwise download itself."""

    packages: list[str] = Field(default_factory=list)
    """Names that are imported."""

    nltk: str | None = None
    """A resource of NLTK's data, as ``nltk.data.find`` names it."""


class TaskEntry(StrictModel):
    """A task, a group of tasks that one pattern finds, or a group that names its tasks."""

    about: str
    """What it measures."""

    harness: str | None = None
    """Its definition below ``lm_eval/tasks``; a pattern for a group of which every file is a task."""

    file: str | None = None
    """Its definition in our folder."""

    tasks: list[str] = Field(default_factory=list)
    """Of a group: its members."""

    dataset: str | None = None
    """Of ``datasets``."""

    subset: str | None = None
    """Of the data set; by default the definition's ``dataset_name``."""

    grade: Literal["humaneval", "mbpp"] | None = None
    """Our metric in the place of the harness's."""

    each: Literal["task", "pair"] | None = None
    """``task``: one task for each value of the rows' column ``task``; ``pair``: one for each of ``pairs``."""

    pairs: list[str] = Field(default_factory=list)
    """Of languages, ``from-to``."""

    rows: int | None = None
    """That are evaluated, where they are not all of the data set's."""

    needs: MetricNeeds = MetricNeeds()
    """Else the task is refused."""

    @model_validator(mode="after")
    def _one_origin(self) -> TaskEntry:
        if sum((self.harness is not None, self.file is not None, bool(self.tasks))) != 1:
            raise ValueError("give one of harness, file and tasks")
        if (self.dataset is None) != bool(self.tasks):
            raise ValueError("a task has a dataset, a group has none")
        return self


class EvalDataset(StrictModel):
    """A data set and where it comes from."""

    licence: str
    """SPDX identifier, as its authors state it."""

    rows: int
    """That are evaluated, of all subsets."""

    hub: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+$")
    """Its repository on the Hugging Face Hub."""

    splits: dict[str, str] = Field(default_factory=dict)
    """Pattern of the files there, by split."""

    package: str | None = None
    """Instead of ``hub``: its folder among our assets."""


class SuiteRegistry(StrictModel):
    """The whole file."""

    suites: dict[str, Suite]
    """By name."""

    tasks: dict[str, TaskEntry]
    """By name; a suite and a task never share one."""

    datasets: dict[str, EvalDataset]
    """By name."""

    @model_validator(mode="after")
    def _names_exist(self) -> SuiteRegistry:
        named = [name for found in (self.suites, self.tasks) for one in found.values() for name in one.tasks]
        if unknown := [name for name in named if name not in self.tasks]:
            raise ValueError(f"no task is called {unknown[0]!r}")
        sets = [task.dataset for task in self.tasks.values() if task.dataset is not None]
        if unknown := [name for name in sets if name not in self.datasets]:
            raise ValueError(f"no data set is called {unknown[0]!r}")
        if shared := sorted(self.suites.keys() & self.tasks.keys()):
            raise ValueError(f"{shared[0]!r} is a suite and a task")
        return self

    def entries(self, name: str) -> Iterator[str]:
        """Return the tasks and pattern groups of a suite, group or task."""
        inside = self.suites[name].tasks if name in self.suites else self.tasks[name].tasks
        if not inside:
            yield name
        for name_inside in inside:
            yield from self.entries(name_inside)


@cache
def listing() -> SuiteRegistry:
    """Load the registry, once."""
    return load_config(ASSETS / "registry.yaml", SuiteRegistry)


def unknown_task(name: str, also: Iterable[str] = ()) -> GymError:
    """Create the error for an unknown name, with similar names."""
    registry = listing()
    names = list(dict.fromkeys((*registry.suites, *registry.tasks, *also)))
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}? " if near else f"suites: {', '.join(registry.suites)}; "
    return GymError(
        ErrorCode.USAGE, f"no suite or task is called {name!r}", f"{hint}`gym eval list` shows all of them"
    )
