"""Looks up names of other platforms in the module that the entry point group ``gym_fed.aliases`` names.

The core knows none of these names. It calls this module just before it refuses a key, a name or a value; the table is
imported then, and not before. Without an entry point every lookup finds nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from gym_fed.core.installed import load_installed

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
    """A word of another platform was used; the message gives ours. The commands print it as one line."""


@dataclass
class Reading:
    """Values in our words.

    Attributes:
        values: Ready to be validated.
        origins: Where a value that has moved stood before, by where it stands now.
        notes: What is called otherwise here: where it stood, the word and our own.
    """

    values: dict[str, Any]
    origins: dict[Place, Place] = field(default_factory=dict)
    notes: list[tuple[Place, str, str]] = field(default_factory=list)


@functools.cache
def _table() -> Any | None:
    """Return the module of the group's first entry point that can be imported; None if there is none."""
    return next(iter(load_installed(_GROUP)), None)


def read(
    schema: str, values: Mapping[str, Any], place: Callable[[Place], str] | None = None
) -> Reading | None:
    """Values of a config that was refused, in our words; None where none of theirs is in it.

    Args:
        schema: Name of the schema's class.
        values: As they came.
        place: Gives the place of a key, where the values are a file's: there, some words are near misses only.

    Raises:
        GymError: For a word that has no counterpart; the error names what to write instead.
    """
    reading: Reading | None = table.read(schema, values, place) if (table := _table()) else None
    return reading


def nearest(schema: str, key: str, value: Any = None) -> str:
    """Our key for one of theirs, or a sentence on what to write; empty where nothing is known."""
    return str(table.nearest(schema, key, value)) if (table := _table()) else ""


def nearest_member(kind: str, name: str) -> str:
    """Return our names of another platform's ``name`` among the members of a kind; empty if unknown."""
    return str(table.nearest_member(kind, name)) if (table := _table()) else ""


def member(kind: str, name: str) -> str | None:
    """Our name of a member of a kind that other platforms call ``name``; None where nothing is known.

    Raises:
        GymError: For one that has no counterpart; the error names what to write instead.
    """
    alias: str | None = table.member(kind, name) if (table := _table()) else None
    return alias


def attribute(owner: str, name: str) -> Any:
    """Return an attribute that other tools' users expect of a module or class; ``MISSING`` if there is none."""
    return table.attribute(owner, name) if (table := _table()) else MISSING


class ExpectedElsewhere:
    """A class whose methods other platforms call by names of their own."""

    if not TYPE_CHECKING:  # a type checker knows our names alone

        def __getattr__(self, name: str) -> Any:
            value = MISSING if name.startswith("_") else attribute(type(self).__name__, name)
            if value is MISSING:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return value.__get__(self)


def with_other_arguments(method: FunctionT) -> FunctionT:
    """A method that other platforms call with other arguments: those that it does not take are looked up."""
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
    """A method that other platforms call on the class itself; there, it is what they know by that name."""

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
    """Say once, in one line, what is called otherwise here."""
    if theirs in _said:
        return
    _said.add(theirs)
    where = f"{place}: " if place else ""
    warnings.warn(f"{where}`{theirs}` is {ours} here", OtherWordNote, stacklevel=_callers())


def _callers() -> int:
    """Return the stack level of the first caller outside gym-fed and pydantic: the line with the word."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(_WITHIN):
        frame, level = frame.f_back, level + 1
    return level
