"""Rows of the alias table, and the values of a file while aliases are replaced by gym-fed's keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from gym_fed.core.aliases import Place, Reading
from gym_fed.core.errors import ErrorCode, GymError

Where = Literal["Python", "command", "YAML"]


@dataclass(frozen=True)
class Alias:
    """A name of another tool.

    Attributes:
        where: The place where users write it.
        theirs: The name in the other tool.
        ours: gym-fed's name; for a refused name, the reason.
        instead: Lines to write instead of a refused name.
    """

    where: Where
    theirs: str
    ours: str
    instead: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """True if the name has no counterpart."""
        return bool(self.instead)


@dataclass(frozen=True)
class Unsupported:
    """The reason why a name has no counterpart, and two lines to write instead."""

    why: str
    instead: tuple[str, str]

    def error(self, theirs: str, place: str = "", code: ErrorCode = ErrorCode.CONFIG_INVALID) -> GymError:
        """Return the error for ``theirs``."""
        where = f"{place}: " if place else ""
        lines = "\n".join(f"  {line}" for line in self.instead)
        return GymError(code, f"{where}{theirs}: {self.why}", f"write instead:\n{lines}")


ValueT = TypeVar("ValueT")


class Draft:
    """The values of a file while aliases are replaced by the keys of gym-fed.

    Args:
        values: The original values, which are not changed.
        place: Returns the place of a key in the file; None for values that are not from a file.
    """

    def __init__(self, values: Mapping[str, Any], place: Callable[[Place], str] | None = None) -> None:
        self.result = Reading(_copied(dict(values)))
        self.written = place is not None
        self._place = place or (lambda path: "")
        self.changed = False

    def get(self, path: str) -> Any:
        """Return the value at ``path`` (``a.b``); None if there is none."""
        value: Any = self.result.values
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def take(self, path: str) -> Any:
        """Remove and return the value at ``path``; drop sections that become empty."""
        parent, _, key = path.rpartition(".")
        section = self.get(parent) if parent else self.result.values
        value = section.pop(key)
        if parent and not section:
            self.take(parent)
        self.changed = True
        return value

    def put(self, path: str, value: Any, origin: str) -> None:
        """Set gym-fed's key ``path`` from the key ``origin``.

        Raises:
            GymError: ``CONFIG_INVALID`` if the key already has a different value.
        """
        section = self.result.values
        *parents, last = path.split(".")
        for key in parents:
            if section.get(key) is None:
                section[key] = {}
            elif not isinstance(section[key], dict):
                problem = f"belongs in section {'.'.join(parents)}, which is {section[key]!r}"
                raise self.problem(origin, problem)
            section = section[key]
        if last in section and section[last] != value:
            raise self.problem(origin, f"is called {path} in gym-fed, but both are given", f"keep {path}")
        section[last] = value
        self.result.origins[_path(path)] = self._written_at(origin)
        self.changed = True

    def move(self, theirs: str, ours: str) -> None:
        """Move a value to a key of gym-fed, with a note.

        Raises:
            GymError: See ``put``.
        """
        self.put(ours, self.take(theirs), theirs)
        self.note(theirs, f"`{ours}`")

    def drop(self, theirs: str, why: str) -> None:
        """Remove a value that gym-fed does not need, with a note."""
        self.take(theirs)
        self.note(theirs, f"not needed ({why})")

    def note(self, theirs: str, ours: str, origin: str | None = None) -> None:
        """Record a note on a renamed key."""
        self.result.notes.append((self._written_at(origin or theirs), theirs, ours))

    def problem(self, path: str, text: str, hint: str = "") -> GymError:
        """Return an error about a key."""
        place = self._place(self._written_at(path))
        where = f"{place}: " if place else ""
        return GymError(ErrorCode.CONFIG_INVALID, f"{where}{path}: {text}", hint)

    def refuse(self, path: str, refusal: Unsupported, theirs: str = "") -> GymError:
        """Return the error for a key without a counterpart."""
        return refusal.error(theirs or path, self._place(self._written_at(path)))

    def _written_at(self, path: str) -> Place:
        """Return the place of ``path`` in the file; the key or its section may have been renamed."""
        keys = _path(path)
        for end in range(len(keys), 0, -1):
            if (before := self.result.origins.get(keys[:end])) is not None:
                return (*before, *keys[end:])
        return keys


@dataclass(frozen=True)
class KeyAlias:
    """A key of another tool.

    Attributes:
        theirs: The key's path, ``a.b``.
        ours: gym-fed's key, to which the value is moved; with ``read``, a description.
        read: Changes the draft if it has the key; None moves the value to ``ours``.
        meant: Returns True for values of the other tool; None if gym-fed has no key with this name.
        shown: The key in the alias table; default ``theirs``.
        where: The place where users write it.
        refusal: The reason for a key without a counterpart. Without ``read``, every value is refused.
        near_only: Returns the error's text for a value in a file, where the key is refused as a near miss.
    """

    theirs: str
    ours: str
    read: Callable[[Draft], None] | None = None
    meant: Callable[[Any], bool] | None = None
    shown: str = ""
    where: str = "YAML"
    refusal: Unsupported | None = None
    near_only: Callable[[Any], str] | None = None

    def apply(self, draft: Draft) -> None:
        """Translate the key, if the draft has it."""
        value = draft.get(self.theirs)
        if value is None or (self.meant is not None and not self.meant(value)):
            return
        if draft.written and self.near_only is not None:
            return
        if self.read is not None:
            self.read(draft)
        elif self.refusal is not None:
            raise draft.refuse(self.theirs, self.refusal, self.shown)
        else:
            draft.move(self.theirs, self.ours)

    @property
    def row(self) -> Alias:
        """The key's row in the alias table."""
        shown = self.shown or self.theirs
        if self.refusal is not None:
            return Alias(self.where, shown, self.refusal.why, self.refusal.instead)  # type: ignore[arg-type]
        plain = self.read is None
        return Alias(self.where, shown, f"`{self.ours}`" if plain else self.ours)  # type: ignore[arg-type]


def _path(text: str) -> Place:
    return tuple(text.split("."))


def _copied(value: ValueT) -> ValueT:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}  # type: ignore[return-value]
    return value
