"""Registries of algorithms, formats and other members, which packages can extend.

    AGGREGATORS.names()             # for a schema, an enum or --help; imports no member
    AGGREGATORS.type_of("krum")     # the class; properties of a member are attributes of its class

Base classes are given as strings, so that a schema in a lower layer can refer to members of a higher layer.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from gym_quant.registry import CODECS, LINEARS, Registry

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain

T = TypeVar("T")

log = logging.getLogger("gym_fed")

__all__ = ["ALL", "CODECS", "LINEARS", "Kind"]


class UnusableMember(GymError):
    """A member of another package cannot be used; ``MISSING_DEPENDENCY``."""

    kind = name = ""

    @classmethod
    def of(cls, kind: str, name: str, message: str, hint: str) -> UnusableMember:
        """Create the error with its registry and member, from which a config error derives the location."""
        made = cls(ErrorCode.MISSING_DEPENDENCY, message, hint)
        made.kind, made.name = kind, name
        return made


class Kind(Registry[T]):
    """A registry that raises ``GymError``: ``CONFIG_INVALID`` for an unknown member, ``MISSING_DEPENDENCY`` for an
    unusable member of another package.
    """

    def unknown(self, name: str) -> Exception:
        return GymError(
            ErrorCode.CONFIG_INVALID, f"unknown {self.kind} {name!r}", f"one of {', '.join(self.names())}"
        )

    def broken(self, name: str, message: str, hint: str) -> Exception:
        return UnusableMember.of(self.kind, name, message, hint)

    def new(self, name: str) -> T:
        """Create a member without settings; raises the errors of ``type_of``."""
        return self.type_of(name)()

    def usable(self, needed: Callable[[str], object] | None = None) -> tuple[str, ...]:
        """Return the names of usable members, sorted. Imports those of other packages, and warns about unusable ones.

        Args:
            needed: Called with a member's name; raises an error if it is unusable. Defaults to ``type_of``.
        """
        names = self.own()
        for name in (name for name in self.names() if name not in self.own()):
            try:
                (needed or self.type_of)(name)
            except GymError as error:
                log.warning("left out: %s; %s", plain(error.message), plain(error.hint))
            else:
                names = (*names, name)
        return tuple(sorted(names))


class TabledKind(Kind[T]):
    """A registry in which some members are objects from a table instead of classes in files.

    Args:
        table: ``module:NAME`` of a mapping of names to members; its import must be cheap.
    """

    def __init__(self, kind: str, package: str, base: str, group: str, table: str) -> None:
        super().__init__(kind, package, base, group)
        self.table = table

    def own(self) -> tuple[str, ...]:
        return tuple(sorted({*super().own(), *self._lines()}))

    def type_of(self, name: str) -> type[T]:
        """Return the class of ``name``; for a table entry, the class of its object. ``new`` returns the object."""
        lines = self._lines()
        return type(lines[name]) if name in lines else super().type_of(name)

    def new(self, name: str) -> T:
        lines = self._lines()
        return lines[name] if name in lines else super().new(name)

    def own_with(self, fact: str) -> tuple[str, ...]:
        return tuple(name for name in self.own() if getattr(self.new(name), fact))

    def _lines(self) -> Mapping[str, T]:
        module, _, name = self.table.partition(":")
        return cast("Mapping[str, T]", getattr(importlib.import_module(module), name))


def _soup(kind: str, folder: str, base: str, group: str = "") -> Kind[Any]:
    return Kind(kind, f"gym_fed.soup.{folder}", f"gym_fed.soup.{base}", f"gym_fed.{group or folder}")


AGGREGATORS = _soup("aggregator", "aggregators", "aggregator:Aggregator")
PRE_AGGREGATORS = _soup("pre-aggregator", "pre_aggregators", "pre_aggregator:PreAggregator")
METHODS = _soup("merge method", "methods", "method:MergeMethod")
SERVER_OPTIMIZERS = _soup("server optimizer", "optimizers", "optimizer:ServerOptimizer", "server_optimizers")
CONTRIBUTIONS = _soup("contribution score", "contributions", "contribution:ContributionMethod")
ALGORITHMS: Kind[Any] = Kind(
    "algorithm",
    "gym_fed.training.algorithms",
    "gym_fed.training.algorithms.base:Algorithm",
    "gym_fed.algorithms",
)
TUNING: Kind[Any] = Kind(
    "tuning method", "gym_fed.training.tuning", "gym_fed.training.tuning.base:Tuning", "gym_fed.tuning"
)
OPTIMIZERS: TabledKind[Any] = TabledKind(
    "optimizer",
    "gym_fed.training.optimizers",
    "gym_fed.training.optimizers.base:OptimizerChoice",
    "gym_fed.optimizers",
    "gym_fed.training.optimizers._table:TABLE",
)
FEATURES: Kind[Any] = Kind(
    "feature", "gym_fed.training.features", "gym_fed.training.features.base:Feature", "gym_fed.features"
)

GRADERS: Kind[Any] = Kind(
    "grader", "gym_fed.evaluation.graders", "gym_fed.evaluation.graders.base:Grader", "gym_fed.graders"
)
TRACKERS: Kind[Any] = Kind(
    "tracker", "gym_fed.tracking.trackers", "gym_fed.tracking.trackers.base:Tracker", "gym_fed.trackers"
)
FORMATS: Kind[Any] = Kind(
    "format", "gym_fed.data.formats", "gym_fed.data.formats.base:Format", "gym_fed.formats"
)
TASKS: TabledKind[Any] = TabledKind(
    "task",
    "gym_fed.data.tasks",
    "gym_fed.data.tasks.base:Task",
    "gym_fed.tasks",
    "gym_fed.data.tasks._table:TABLE",
)
EXPORT_FORMATS: Kind[Any] = Kind(
    "export format",
    "gym_fed.export.formats",
    "gym_fed.export.formats.base:ExportFormat",
    "gym_fed.export_formats",
)
TOOL_FORMATS: Kind[Any] = Kind(
    "tool format",
    "gym_fed.serving.openai.tool_formats",
    "gym_fed.serving.openai.tool_formats.base:ToolFormat",
    "gym_fed.tool_formats",
)
REASONING_PARSERS: Kind[Any] = Kind(
    "reasoning parser",
    "gym_fed.serving.reasoning.parsers",
    "gym_fed.serving.reasoning.base:ReasoningParser",
    "gym_fed.reasoning_parsers",
)
SCHEDULERS: Kind[Any] = Kind(
    "scheduler",
    "gym_fed.training.launch",
    "gym_fed.training.launch.base:ClusterScheduler",
    "gym_fed.schedulers",
)
ENGINES: Kind[Any] = Kind(
    "engine", "gym_fed.serving.engines", "gym_fed.serving.engines.base:EngineKind", "gym_fed.engines"
)
CHECKS: Kind[Any] = Kind("check", "gym_fed.doctor.checks", "gym_fed.doctor.check:Check", "gym_fed.checks")

ALL: tuple[Registry[Any], ...] = (
    CODECS,
    LINEARS,
    AGGREGATORS,
    PRE_AGGREGATORS,
    METHODS,
    SERVER_OPTIMIZERS,
    CONTRIBUTIONS,
    ALGORITHMS,
    TUNING,
    OPTIMIZERS,
    FEATURES,
    GRADERS,
    TRACKERS,
    FORMATS,
    TASKS,
    CHECKS,
    EXPORT_FORMATS,
    TOOL_FORMATS,
    REASONING_PARSERS,
    SCHEDULERS,
    ENGINES,
)
"""All registries, for `gym docs members` and `gym doctor`."""
