"""A variant in memory, ready for a batch, and where the engine gets one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Operand(ABC):
    """One parameter's delta in memory."""

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes of memory that it takes."""

    def rows(self, rows: Tensor) -> Tensor:
        """Rows of a matrix's delta (``[n] int64``) as ``[n, cols]``: what an embedding adds."""
        raise NotImplementedError(type(self).__name__)


@dataclass(frozen=True, eq=False)
class LoadedVariant:
    """What a variant adds to the base, parameter by parameter.

    Attributes:
        name: Of the variant.
        delta_sha256: Of its file.
        operands: By name of the base's parameter; what is absent is unchanged.
        resident_bytes: What it takes of memory.
    """

    name: str
    delta_sha256: str
    operands: Mapping[str, Operand]
    resident_bytes: int


class VariantSource(Protocol):
    """Where the engine gets variants. All calls may come from any thread; only ``acquire`` may wait."""

    def prefetch(self, name: str) -> None:
        """Begin to page a variant in, in the background.

        Raises:
            GymError: ``NOT_FOUND`` for a name that is not registered.
        """

    def poll(self, name: str) -> LoadedVariant | None:
        """The variant, pinned until ``release``, if it is in memory; None while it is on its way (and begins that).

        Raises:
            GymError: Why it cannot be loaded: ``NOT_FOUND``, ``SIGNATURE_INVALID``, ``HASH_MISMATCH``, ...
        """

    def lacks_room(self, name: str) -> bool:
        """Whether a variant for which ``poll`` gave None waits until others that are in use are released."""

    def acquire(self, name: str) -> LoadedVariant:
        """The variant, pinned until ``release``; waits for it. Raises as ``poll``."""

    def release(self, variant: LoadedVariant) -> None:
        """It is no longer in use by this caller."""
