"""The interface of encoded rows that are already a dataset. The module does not import pyarrow, which hubs lack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class TrainingRows(Protocol):
    """The interface of encoded rows that are already a ``datasets.Dataset``."""

    largest: Mapping[str, int]
    """Largest value of each column of ids, if known."""

    def as_dataset(self, num_embeddings: int) -> Any:
        """Return the dataset, for a model with this number of embedding rows."""
