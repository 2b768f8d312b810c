"""Look up the names that other tools use, in the module of the entry point group ``gym_fed.aliases``.

The core contains no such names. It imports the entry point's module only when it is about to reject an unknown key,
name or value. Without an entry point, all lookups return nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from gym_fed.core.requirements import load_installed

Place = tuple[str | int, ...]
SelfT = TypeVar("SelfT")
ResultT = TypeVar("ResultT")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
ArgumentsT = ParamSpec("ArgumentsT")
MISSING = object()
_WITHIN = ("gym_fed", "pydantic")
_GROUP = "gym_fed.aliases"
_said: set[str] = set()


class OtherWordNote(UserWarning):
    """A warning that a name from another tool was used. It gives gym-fed's name; commands print it as one line."""


@dataclass
class Reading:
    """Config values after translation to gym-fed's names.

    Attributes:
        values: Values to validate.
        origins: Original location of each moved value, by its new location.
        notes: Renamed keys and values: location, original name and gym-fed's name.
    """

    values: dict[str, Any]
    origins: dict[Place, Place] = field(default_factory=dict)
    notes: list[tuple[Place, str, str]] = field(default_factory=list)


@functools.cache
def _table() -> Any | None:
    """Return the module of the group's first importable entry point; None if there is none."""
    return next(iter(load_installed(_GROUP)), None)


def read(
    schema: str, values: Mapping[str, Any], place: Callable[[Place], str] | None = None
) -> Reading | None:
    """Translate the values of a rejected config; None if it has no names from other tools.

    Args:
        schema: Name of the schema's class.
        values: The config's values, not validated.
        place: Function that formats the location of a key in a file. In files, some names are only suggested, not
            translated.

    Raises:
        GymError: If a name has no counterpart; the error names the replacement.
    """
    reading: Reading | None = table.read(schema, values, place) if (table := _table()) else None
    return reading


def nearest(schema: str, key: str, value: Any = None) -> str:
    """Return gym-fed's key for another tool's key, or a sentence that says what to write instead; empty if unknown."""
    return str(table.nearest(schema, key, value)) if (table := _table()) else ""


def nearest_member(kind: str, name: str) -> str:
    """Return gym-fed's names for another tool's ``name`` in a registry; empty if unknown."""
    return str(table.nearest_member(kind, name)) if (table := _table()) else ""


def member(kind: str, name: str) -> str | None:
    """Return gym-fed's name for a registry member of another tool; None if unknown.

    Raises:
        GymError: If the member has no counterpart; the error names the replacement.
    """
    alias: str | None = table.member(kind, name) if (table := _table()) else None
    return alias


def attribute(owner: str, name: str) -> Any:
    """Return an attribute that users of other tools expect on a module or class; ``MISSING`` if there is none."""
    return table.attribute(owner, name) if (table := _table()) else MISSING


class ExpectedElsewhere:
    """Base class that resolves the method names of other tools."""

    if not TYPE_CHECKING:  # type checkers must see only gym-fed's names

        def __getattr__(self, name: str) -> Any:
            value = MISSING if name.startswith("_") else attribute(type(self).__name__, name)
            if value is MISSING:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return value.__get__(self)


def with_other_arguments(method: FunctionT) -> FunctionT:
    """Decorate a method so that it accepts the keyword arguments of other tools."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        try:
            signature.bind(self, *given, **named)
        except TypeError:
            value = attribute(type(self).__name__, method.__name__)
            if value is MISSING:
                raise
            return value(self, *given, **named)
        return method(self, *given, **named)

    return cast("FunctionT", call)


class on_class_too(Generic[SelfT, ArgumentsT, ResultT]):
    """Descriptor for a method that users of other tools call on the class."""

    def __init__(self, method: Callable[Concatenate[SelfT, ArgumentsT], ResultT]) -> None:
        self._method = method
        functools.update_wrapper(self, method)  # type: ignore[arg-type]

    def __get__(self, instance: SelfT | None, owner: type) -> Callable[ArgumentsT, ResultT]:
        if instance is not None:
            return functools.partial(self._method, instance)
        method = attribute(owner.__name__, self._method.__name__)
        if method is MISSING:
            method = self._method
        return cast("Callable[ArgumentsT, ResultT]", method)


def note(theirs: str, ours: str, place: str = "") -> None:
    """Warn once about a renamed key or value."""
    if theirs in _said:
        return
    _said.add(theirs)
    where = f"{place}: " if place else ""
    warnings.warn(f"{where}`{theirs}` is {ours} here", OtherWordNote, stacklevel=_callers())


def _callers() -> int:
    """Return the stack level of the first caller outside gym-fed and pydantic, which used the name."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(_WITHIN):
        frame, level = frame.f_back, level + 1
    return level
