"""The protocol of encoded rows that are a data set already. A hub checks recipes with it, and has no pyarrow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class TrainingRows(Protocol):
    """Encoded rows that are a data set of ``datasets`` already."""

    largest: Mapping[str, int]
    """Largest value of each column of ids, as far as known."""

    def as_dataset(self, num_embeddings: int) -> Any:
        """Return the data set, for a model with that many rows of embeddings."""
