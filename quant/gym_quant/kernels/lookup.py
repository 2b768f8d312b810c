"""Lookup tables of a layer's inputs, computed once and used for every delta with the same input."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels import native_tiles
from gym_quant.resident import IndexArray

MODES = ("exact", "lookup", "lookup16")
"""Precisions of products with signs: float32, or sums of four inputs rounded to 8 or 16 bits."""


@dataclass(frozen=True, eq=False)
class LookupTables:
    """Tables for rows ``[batch, in]``.

    Attributes:
        mode: ``lookup`` or ``lookup16``.
        made: Codes, steps, and each row's state, from ``native_tiles.lookup_tables``.
    """

    mode: str
    made: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, x: Tensor, mode: str, index: IndexArray | None, path: str) -> LookupTables:
        """Build tables for the rows of ``x`` ``[batch, in]`` float32 whose index is not -1 (no index: all rows)."""
        return cls(mode, native_tiles.lookup_tables(path, mode == "lookup16", x, index))

    @property
    def finite(self) -> Tensor:
        """Return ``[batch]`` bool: False where an input, or a sum of four, is not finite."""
        return self.made[2] != 0

    def add(
        self, path: str, x: Tensor, index: IndexArray, y: Tensor, matrices: native_tiles.Matrices
    ) -> None:
        """Add products as ``SignBatch.add`` does.

        Raises:
            CodecError: For a row without tables.
        """
        if not native_tiles.add_by_lookup(path, self.mode == "lookup16", x, index, y, matrices, self.made):
            raise CodecError("the tables lack a row that index refers to: build them from all rows")
