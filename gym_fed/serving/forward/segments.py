"""The rows of a step by variant, and the variants of a model's steps."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gym_quant.kernels import dispatch
from gym_quant.kernels.lookup import MODES
from gym_quant.kernels.resident import ResidentSigns
from gym_quant.resident import IndexArray, ResidentBatch, ResidentFactors, ResidentLevels
from torch import Tensor

from gym_fed.serving.forward.active_variants import ActiveVariants, Packed
from gym_fed.serving.forward.loaded import LoadedVariant
from gym_fed.serving.forward.target_modules import ModelLayout
from gym_fed.serving.forward.variant_weights import MergedWeights


@dataclass(eq=False)
class Segments:
    """The rows of each variant at a module: of all tokens of a step, or of those with logits.

    Attributes:
        spans: The variant's number, first row, and row after the last; rows of the base are in none.
        total: The number of rows.
        bulk_rows: Spans of this many rows or more are multiplied as a whole instead of row by row.
    """

    spans: Sequence[tuple[int, int, int]]
    total: int
    bulk_rows: int
    device: torch.device
    bulk: list[tuple[int, int, int]] = field(init=False)
    few: Tensor | None = field(init=False)
    """Rows of spans that are not bulk; None: all rows of the step."""
    few_index: IndexArray = field(init=False)
    """The variant of each of these rows."""
    owned: Tensor | None = field(init=False)
    """Rows of all spans; None: all rows of the step."""
    owner: Tensor = field(init=False)
    """The variant of each of these rows."""
    _masks: dict[Any, Tensor] = field(init=False, default_factory=dict)
    _places: dict[bytes, IndexArray] = field(init=False, default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[tuple[int | None, int]], bulk_rows: int, device: torch.device) -> Segments:
        """Create segments from the variant's number (None: the base) and the rows of each part of a step, in order."""
        spans: list[tuple[int, int, int]] = []
        end = 0
        for variant, rows in parts:
            if variant is not None and rows:
                if spans and spans[-1][0] == variant and spans[-1][2] == end:
                    spans[-1] = (variant, spans[-1][1], end + rows)
                else:
                    spans.append((variant, end, end + rows))
            end += rows
        return cls(spans, end, bulk_rows, device)

    def __post_init__(self) -> None:
        self.bulk = [s for s in self.spans if s[2] - s[1] >= self.bulk_rows]
        few, few_owner = self._rows([s for s in self.spans if s[2] - s[1] < self.bulk_rows])
        owned, owner = self._rows(self.spans)
        self.few_index = few_owner
        self.few = None if len(few) == self.total else torch.from_numpy(few).to(self.device)
        self.owned = None if len(owned) == self.total else torch.from_numpy(owned).to(self.device)
        self.owner = torch.from_numpy(owner).to(self.device)

    @cached_property
    def owners(self) -> Tensor:
        """The variant of every row, -1 for the base: ``[total] int64``."""
        owners = torch.full((self.total,), -1, device=self.device)
        for variant, start, stop in self.spans:
            owners[start:stop] = variant
        return owners

    @cached_property
    def few_owners(self) -> IndexArray:
        """The variant of every row, -1 for the base and for bulk spans: ``[total]``."""
        owners = np.full(self.total, -1, dtype=np.int64)
        for variant, start, stop in self.spans:
            if stop - start < self.bulk_rows:
                owners[start:stop] = variant
        return owners

    @cached_property
    def few_owners_at(self) -> int:
        """The address of ``few_owners``."""
        return int(self.few_owners.ctypes.data)

    def few_in(self, packed: Packed) -> IndexArray:
        """Return ``few_index`` in the numbers of a layer's own batch."""
        if packed.place is None:
            return self.few_index
        key = packed.place.tobytes()
        if key not in self._places:
            self._places[key] = packed.place[self.few_index]
        return self._places[key]

    def all_in(self, packed: Packed) -> IndexArray:
        """Return ``owners`` in the numbers of a layer's own batch."""
        owners: IndexArray = self.owners.numpy()
        return owners if packed.place is None else packed.place[owners]

    def foreign(self, owners: tuple[int, ...]) -> Tensor:
        """Return ``[owned rows, ranks] bool``: true where a rank belongs to another variant than the row."""
        mask = self._masks.get(owners)
        if mask is None:
            ranks = torch.tensor(owners, device=self.device)
            mask = self.owner[:, None] != ranks[None, :]
            self._masks[owners] = mask
        return mask

    @staticmethod
    def _rows(spans: Sequence[tuple[int, int, int]]) -> tuple[IndexArray, IndexArray]:
        if not spans:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        rows = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
        owners = np.concatenate([np.full(stop - start, v) for v, start, stop in spans])
        return rows.astype(np.int64), owners.astype(np.int64)


@dataclass
class StepRows:
    """The step being computed: its active variants and their segments."""

    active: ActiveVariants
    body: Segments
    head: Segments
    path: str
    """The code path of the sign kernels."""
    products: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Multiplications of packed deltas by form and kernel; ``decoded`` for a bulk span."""
    merged: MergedWeights | None = None
    """Set if all rows are of one variant whose products may be merged with the base's."""
    product: Tensor | None = None
    """The merged product of the linear layer being computed."""
    _given: Tensor | None = None
    _few: Tensor | None = None
    _tables: dict[str, object | None] = field(default_factory=dict)

    def few(self, x: Tensor, flat: Tensor, rows: Segments) -> Tensor:
        """Return the rows that are multiplied one by one, float32. Query, key and value share them with their input."""
        if self._given is not x or self._few is None:
            some = flat if rows.few is None else flat.index_select(0, rows.few)
            self._given, self._few = x, some.to(torch.float32).contiguous()
            self._tables.clear()
        return self._few

    def tables(self, batch: ResidentBatch, some: Tensor) -> object | None:
        """Return what batches of one kernel share for the rows of ``few``: look-up tables."""
        if batch.kernel not in self._tables:
            self._tables[batch.kernel] = batch.tables(some, None, self.path)
        return self._tables[batch.kernel]

    def forget_input(self) -> None:
        """Forget the shared rows, before a module whose input reuses another's tensor."""
        self._given = None


_BULK_ROWS = {"cpu": 512}
"""From this many rows of one variant on, the kernel ``exact`` decodes its bits for a dense product. On a CPU it is as
fast up to 256 rows (4096 x 4096, bfloat16, one core: 64 rows 37 ms against 59, 256 rows 112 against 122); by look-up
512 rows take 21 ms where a bfloat16 product of the base takes 82."""
_BULK_ROWS_ELSEWHERE = 32


class StepVariants:
    """The variants of one model's steps.

    Args:
        layout: The layout of the model.

    Attributes:
        bulk_rows: From this many rows on, the rows of one variant are multiplied as a whole.
        products: See ``MultiVariantModel.products``.
    """

    def __init__(self, layout: ModelLayout) -> None:
        self._layout, self._device = layout, torch.device(layout.device)
        self._active: ActiveVariants | None = None
        exact = _BULK_ROWS.get(self._device.type, _BULK_ROWS_ELSEWHERE)
        self.bulk_rows = exact if layout.kernel == "exact" else sys.maxsize
        self.products: Counter[tuple[str, str]] = Counter()

    def release(self) -> None:
        """Drop the references to the last step's variants."""
        self._active = None

    def rows(
        self, parts: Sequence[tuple[LoadedVariant | None, int, int]], merge: bool = False
    ) -> StepRows | None:
        """Return the rows of a step; None if all are of the base.

        Args:
            parts: For each run of rows in order: its variant, tokens, and rows of logits.
            merge: Whether base and delta may be multiplied at once where all rows are of one variant.
        """
        variants = sorted({variant for variant, _, _ in parts if variant is not None}, key=id)
        if not variants:
            self._active = None  # so that it keeps no variant in memory
            return None
        if self._active is None or self._active.variants != tuple(variants):
            self._active = ActiveVariants(variants, self._layout, self.bulk_rows)
        number = {id(variant): at for at, variant in enumerate(variants)}
        own = [(None if v is None else number[id(v)], tokens, logits) for v, tokens, logits in parts]
        body = Segments.of([(v, tokens) for v, tokens, _ in own], self.bulk_rows, self._device)
        head = Segments.of([(v, logits) for v, _, logits in own], self.bulk_rows, self._device)
        alone = [span[1:] for span in body.spans] == [(0, body.total)]
        merged = self._active.merged if merge and alone else None
        return StepRows(self._active, body, head, dispatch.path(), self.products, merged)

    def sign_products(self) -> dict[str, int]:
        """Count the products of sign deltas by kernel."""
        return {kernel: self.products[ResidentSigns.form, kernel] for kernel in (*MODES, "decoded")}

    def packed_products(self) -> dict[str, int]:
        """Count the products of all other packed deltas by form, without factors."""
        counts = Counter({ResidentLevels.form: 0})
        for (form, _), count in dict(self.products).items():
            if form not in (ResidentSigns.form, ResidentFactors.form):
                counts[form] += count
        return dict(counts)
