"""What a variant adds to one parameter of the base, in the form in which the mixed step computes with it."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Operand(ABC):
    """One parameter's delta in memory."""

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes of memory that it takes."""
