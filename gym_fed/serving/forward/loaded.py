"""A variant in memory, and the interface by which the engine gets one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class VariantWeight(ABC):
    """The delta of one parameter in memory."""

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes of memory that it takes."""

    def rows(self, rows: Tensor) -> Tensor:
        """Return rows ``[n] int64`` of a matrix's delta as ``[n, cols]``, for embeddings."""
        raise NotImplementedError(type(self).__name__)


@dataclass(frozen=True, eq=False)
class LoadedVariant:
    """The deltas that a variant adds to the base.

    Attributes:
        name: The name of the variant that it was loaded for; others with the same file use it too.
        delta_sha256: The SHA-256 of its file.
        weights: The deltas by name of the base's parameter; absent parameters are unchanged.
        resident_bytes: Bytes of memory that it takes.
    """

    name: str
    delta_sha256: str
    weights: Mapping[str, VariantWeight]
    resident_bytes: int


class VariantSource(Protocol):
    """Supplies the engine with variants. Every method is thread-safe; only ``acquire`` may block."""

    def prefetch(self, name: str) -> None:
        """Start loading a variant in the background.

        Raises:
            GymError: ``NOT_FOUND`` for a name that is not registered.
        """

    def poll(self, name: str) -> LoadedVariant | None:
        """Return the variant, pinned until ``release``, if it is in memory; otherwise start its load and return None.

        Raises:
            GymError: If it cannot be loaded: ``NOT_FOUND``, ``SIGNATURE_INVALID``, ``HASH_MISMATCH``, ...
        """

    def lacks_room(self, name: str) -> bool:
        """Return whether a variant for which ``poll`` returned None waits for the release of others in use."""

    def acquire(self, name: str) -> LoadedVariant:
        """Wait for the variant, pinned until ``release``. Raises as ``poll``."""

    def release(self, variant: LoadedVariant) -> None:
        """End one use of it."""
