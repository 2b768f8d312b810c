"""A header's keys as typed values: what is asked for is taken, and what nobody took is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gym_fed.base.imports.gguf.header import Header, invalid
from gym_fed.core.errors import GymError
from gym_fed.core.text import plain


class ArchitectureKeys:
    """The keys of one architecture, ``llama.*`` of a header."""

    def __init__(self, header: Header, architecture: str) -> None:
        self._header, self._prefix = header, f"{architecture}."
        self._left = {key for key in header.values if key.startswith(self._prefix)}

    def integer(self, key: str, default: int | None = None) -> int:
        """A count of at least 1; one number for all layers."""
        found = self._found(key, default)
        if isinstance(found, np.ndarray) and found.size and (found == found[0]).all():
            found = found[0].item()
        if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < 1 << 31:
            raise self.refused(key, found)
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number, in the shortest digits that are the file's float32."""
        found = self._found(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.refused(key, found)
        with np.errstate(over="ignore"):
            rounded = float(str(np.float32(found)))
        if not (math.isfinite(rounded) and rounded > 0):
            raise self.refused(key, found)
        return rounded

    def text(self, key: str, default: str) -> str:
        """A word."""
        found = self._found(key, default)
        if not isinstance(found, str):
            raise self.refused(key, found)
        return found

    def has(self, key: str) -> bool:
        """Whether the file states it."""
        return self._prefix + key in self._header.values

    def must_be(self, key: str, *allowed: Any) -> None:
        """Refuse any value but these; absent is allowed."""
        if self.has(key) and (found := self._found(key, None)) not in allowed:
            raise self.refused(key, found)

    def ignore(self, *keys: str) -> None:
        """What says nothing about how the model computes, or what the tensors' shapes say again."""
        self._left.difference_update(self._prefix + key for key in keys)

    def require_all_taken(self) -> None:
        """Refuse keys that nobody asked for: the model would compute something else.

        Raises:
            GymError: ``MODEL_INVALID``.
        """
        if self._left:
            shown = ", ".join(plain(key, 80) for key in sorted(self._left)[:5])
            raise invalid(
                self._header.file,
                f"has settings that are not read here: {shown}",
                "give the model folder that it was made of",
            )

    def refused(self, key: str, found: Any) -> GymError:
        """That a value cannot be used."""
        shown = "is missing" if found is None else f"is {plain(str(found), 80)}"
        return invalid(
            self._header.file,
            f"{self._prefix}{key} {shown}, which is not read here",
            "give the model folder that it was made of",
        )

    def _found(self, key: str, default: Any) -> Any:
        self._left.discard(self._prefix + key)
        return self._header.values.get(self._prefix + key, default)
