"""Everything that comes in kinds: what its members are called, where ours stand, and how a package adds its own.

    AGGREGATORS.names()             # for a schema, an enum, --help; imports no member
    AGGREGATORS.type_of("krum")     # the class; what is true of a member is an attribute of it

Bases are named by text, so that a schema at the ground asks for members that stand far above it.
"""

from __future__ import annotations

from typing import Any, TypeVar

from gym_quant.registry import CODECS, Registry

from gym_fed.errors import ErrorCode, GymError

T = TypeVar("T")

__all__ = ["ALL", "CODECS", "Kind"]


class Kind(Registry[T]):
    """A registry that refuses with ``GymError``: ``CONFIG_INVALID`` for an unknown member, ``MISSING_DEPENDENCY`` for
    one of another package that cannot be used."""

    def unknown(self, name: str) -> Exception:
        return GymError(
            ErrorCode.CONFIG_INVALID, f"unknown {self.kind} {name!r}", f"one of {', '.join(self.names())}"
        )

    def broken(self, message: str, hint: str) -> Exception:
        return GymError(ErrorCode.MISSING_DEPENDENCY, message, hint)


def _soup(kind: str, folder: str, base: str) -> Kind[Any]:
    return Kind(kind, f"gym_fed.soup.{folder}", f"gym_fed.soup.{base}", f"gym_fed.{folder}")


AGGREGATORS = _soup("aggregator", "aggregators", "aggregator:Aggregator")
PRE_AGGREGATORS = _soup("pre-aggregator", "pre_aggregators", "pre_aggregator:PreAggregator")
METHODS = _soup("merge method", "methods", "method:MergeMethod")
SERVER_OPTIMIZERS = _soup("server optimizer", "optimizers", "optimizer:ServerOptimizer")
CONTRIBUTIONS = _soup("contribution score", "contributions", "contribution:ContributionMethod")

ALL: tuple[Registry[Any], ...] = (
    CODECS,
    AGGREGATORS,
    PRE_AGGREGATORS,
    METHODS,
    SERVER_OPTIMIZERS,
    CONTRIBUTIONS,
)
"""Every kind; docs/support.md and `gym doctor` go through it."""
