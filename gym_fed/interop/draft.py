"""Rows of the alias table, and the values of a file while aliases are replaced by our keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from gym_fed.core.aliases import Place, Reading
from gym_fed.core.errors import ErrorCode, GymError

Where = Literal["Python", "command", "YAML"]


@dataclass(frozen=True)
class Alias:
    """A word of another tool.

    Attributes:
        where: What it is typed into.
        theirs: As it is typed.
        ours: What it is here; for one that is refused, why.
        instead: The lines to write instead of one that is refused.
    """

    where: Where
    theirs: str
    ours: str
    instead: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """True if it has no counterpart."""
        return bool(self.instead)


@dataclass(frozen=True)
class Refusal:
    """Why something has no counterpart, and the two lines to write instead."""

    why: str
    instead: tuple[str, str]

    def error(self, theirs: str, place: str = "", code: ErrorCode = ErrorCode.CONFIG_INVALID) -> GymError:
        """The refusal of ``theirs``."""
        where = f"{place}: " if place else ""
        lines = "\n".join(f"  {line}" for line in self.instead)
        return GymError(code, f"{where}{theirs}: {self.why}", f"write instead:\n{lines}")


ValueT = TypeVar("ValueT")


class Draft:
    """Values that are put into our words.

    Args:
        values: As they came; they stay as they are.
        place: Gives the place of a key in a file; None where the values are not a file's.
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
        """Remove the value at ``path``, and the sections that are then empty."""
        first, _, rest = path.rpartition(".")
        section = self.get(first) if first else self.result.values
        value = section.pop(rest)
        if first and not section:
            self.take(first)
        self.changed = True
        return value

    def put(self, path: str, value: Any, origin: str) -> None:
        """Set one of our keys.

        Raises:
            GymError: ``CONFIG_INVALID`` where it is given, too, with another value.
        """
        place = self.result.values
        *above, last = path.split(".")
        for key in above:
            if place.get(key) is None:
                place[key] = {}
            elif not isinstance(place[key], dict):
                raise self.problem(origin, f"goes into {'.'.join(above)}, which is {place[key]!r}")
            place = place[key]
        if last in place and place[last] != value:
            raise self.problem(origin, f"is {path} here, and both are given", f"keep {path}")
        place[last] = value
        self.result.origins[_path(path)] = self._written_at(origin)
        self.changed = True

    def note(self, theirs: str, ours: str, origin: str | None = None) -> None:
        """Remember what is called otherwise."""
        self.result.notes.append((self._written_at(origin or theirs), theirs, ours))

    def problem(self, path: str, text: str, hint: str = "") -> GymError:
        """An error about one key."""
        place = self._place(self._written_at(path))
        return GymError(
            ErrorCode.CONFIG_INVALID, f"{place}: {path}: {text}" if place else f"{path}: {text}", hint
        )

    def refuse(self, path: str, refusal: Refusal, theirs: str = "") -> GymError:
        """An error about one that has no counterpart."""
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
        theirs: Where it stands, ``a.b``.
        ours: What it is here, in words; alone, the key that it is moved to.
        read: Changes the draft; None moves the value to ``ours``. It is called where the key is there.
        meant: Whether a value is theirs and not ours; None where the key is never ours.
        shown: How the table writes it; by default as ``theirs``.
        where: What it is typed into.
        refusal: Set where it has no counterpart: every value is refused, or where ``read`` says so.
        near_only: In a file it is a near miss: its error has this text, ``{value}`` being the value.
    """

    theirs: str
    ours: str
    read: Callable[[Draft], None] | None = None
    meant: Callable[[Any], bool] | None = None
    shown: str = ""
    where: str = "YAML"
    refusal: Refusal | None = None
    near_only: Callable[[Any], str] | None = None

    def apply(self, draft: Draft) -> None:
        """Read it, where it is there."""
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
            draft.put(self.ours, draft.take(self.theirs), self.theirs)
            draft.note(self.theirs, f"`{self.ours}`")

    @property
    def row(self) -> Alias:
        """Its line in the table."""
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
