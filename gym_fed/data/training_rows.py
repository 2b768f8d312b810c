"""The interface of encoded rows that are already a data set. It imports no pyarrow, which a hub does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class TrainingRows(Protocol):
    """Encoded rows that are already a data set of ``datasets``."""

    largest: Mapping[str, int]
    """Largest value of each column of ids, if known."""

    def as_dataset(self, num_embeddings: int) -> Any:
        """Return the data set, for a model with that many rows of embeddings."""
