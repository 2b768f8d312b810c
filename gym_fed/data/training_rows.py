"""The interface of encoded rows that are already a data set. The module does not import pyarrow, which hubs lack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class TrainingRows(Protocol):
    """The interface of encoded rows that are already a data set of ``datasets``."""

    largest: Mapping[str, int]
    """Largest value of each column of ids, if known."""

    def as_dataset(self, num_embeddings: int) -> Any:
        """Return the data set, for a model with this number of embedding rows."""
