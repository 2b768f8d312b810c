"""Group the rows of a step by variant, and add each variant's terms to them at every module.

Inputs and outputs are in the base's dtype, or in float32 with deltas in the base's dtype.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gym_quant.kernels import dispatch
from gym_quant.kernels.lookup import MODES
from gym_quant.kernels.resident import ResidentSigns, SignBatch
from gym_quant.resident import IndexArray, ResidentBatch, ResidentFactors, ResidentLevels
from torch import Tensor

from gym_fed.serving.forward.active_variants import ActiveVariants, Factors, ModulePlan, Packed
from gym_fed.serving.forward.target_modules import ModelLayout, TargetModule, normal_form
from gym_fed.serving.forward.variant_weights import LoadedVariant, MergedWeights


@dataclass(eq=False)
class Segments:
    """The rows of each variant at a module, among all tokens of a step or only those with logits.

    Attributes:
        spans: The variant's number, first row, and row after the last, of each span; rows of the base are not included.
        total: The number of rows.
        bulk_rows: Minimum number of rows of a bulk span, which is multiplied as one matrix instead of row by row.
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
        """Return ``few_index``, with variants numbered as in a layer's own batch."""
        if packed.place is None:
            return self.few_index
        key = packed.place.tobytes()
        if key not in self._places:
            self._places[key] = packed.place[self.few_index]
        return self._places[key]

    def all_in(self, packed: Packed) -> IndexArray:
        """Return ``owners`` with variants numbered as in a layer's own batch."""
        owners: IndexArray = self.owners.numpy()
        return owners if packed.place is None else packed.place[owners]

    def foreign(self, owners: tuple[int, ...]) -> Tensor:
        """Return ``[owned rows, ranks] bool``: True where a rank belongs to a different variant than the row."""
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
    """The sums of the base and the delta, if all rows belong to the same variant and merging is allowed."""
    product: Tensor | None = None
    """The merged product of the linear layer being computed."""
    _given: Tensor | None = None
    _few: Tensor | None = None
    _tables: dict[str, object | None] = field(default_factory=dict)

    def few(self, x: Tensor, flat: Tensor, rows: Segments) -> Tensor:
        """Return the rows that are multiplied one by one, as float32; query, key and value share the result."""
        if self._given is not x or self._few is None:
            some = flat if rows.few is None else flat.index_select(0, rows.few)
            self._given, self._few = x, some.to(torch.float32).contiguous()
            self._tables.clear()
        return self._few

    def tables(self, batch: ResidentBatch, some: Tensor) -> object | None:
        """Return lookup tables for the rows of ``few``, shared by batches with the same kernel; None if not needed."""
        if batch.kernel not in self._tables:
            self._tables[batch.kernel] = batch.tables(some, None, self.path)
        return self._tables[batch.kernel]

    def forget_input(self) -> None:
        """Drop the shared rows before a module whose input is in a reused buffer."""
        self._given = None


_BULK_ROWS = {"cpu": 512}
"""Minimum number of rows of one variant for which the kernel ``exact`` decodes bits for a dense product. On a CPU, both
are about equally fast up to 256 rows (4096 x 4096, bfloat16, one core: 37 ms against 59 for 64 rows, 112 against 122
for 256). With lookup, 512 rows take 21 ms; a bfloat16 product of the base takes 82."""
_BULK_ROWS_ELSEWHERE = 32


class StepVariants:
    """The variants of one model's steps.

    Attributes:
        bulk_rows: Minimum number of rows of one variant that are multiplied as one matrix.
        products: See ``MultiVariantModel.products``.
    """

    def __init__(self, layout: ModelLayout) -> None:
        self._layout, self._device = layout, torch.device(layout.device)
        self._actives: dict[tuple[LoadedVariant, ...], ActiveVariants] = {}
        """The sets of variants in the forward passes of the last step."""
        exact = _BULK_ROWS.get(self._device.type, _BULK_ROWS_ELSEWHERE)
        self.bulk_rows = exact if layout.kernel == "exact" else sys.maxsize
        self.products: Counter[tuple[str, str]] = Counter()

    def release(self) -> None:
        """Drop the references to the last step's variants."""
        self._actives.clear()

    def keep(self, variants: Iterable[LoadedVariant | None]) -> None:
        """Drop the references to variants that the next step does not use."""
        kept = set(variants)
        self._actives = {key: active for key, active in self._actives.items() if kept.issuperset(key)}

    def rows(
        self, parts: Sequence[tuple[LoadedVariant | None, int, int]], merge: bool = False
    ) -> StepRows | None:
        """Return the rows of a step; None if all belong to the base.

        Args:
            parts: The variant, number of tokens, and rows of logits of each run of rows, in order.
            merge: True if base and delta may be multiplied together if all rows belong to one variant.
        """
        variants = tuple(sorted({variant for variant, _, _ in parts if variant is not None}, key=id))
        if not variants:
            return None
        active = self._actives.get(variants)
        if active is None:
            active = self._actives[variants] = ActiveVariants(variants, self._layout, self.bulk_rows)
        number = {id(variant): at for at, variant in enumerate(variants)}
        own = [(None if v is None else number[id(v)], tokens, logits) for v, tokens, logits in parts]
        body = Segments.of([(v, tokens) for v, tokens, _ in own], self.bulk_rows, self._device)
        head = Segments.of([(v, logits) for v, _, logits in own], self.bulk_rows, self._device)
        alone = [span[1:] for span in body.spans] == [(0, body.total)]
        merged = active.merged if merge and alone else None
        return StepRows(active, body, head, dispatch.path(), self.products, merged)

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


def add_linear(
    target: TargetModule,
    plan: ModulePlan,
    step: StepRows,
    x: Tensor,
    output: Tensor,
    bound: Collection[Packed | Factors] = (),
) -> None:
    """Add the terms of a linear layer with the input ``x`` ``[..., in]`` to ``output`` ``[..., out]``.

    For modules in ``bound``, factors are already added to all rows, and packed terms to rows that are not bulk.
    """
    rows = step.head if target.head else step.body
    flat, y = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
    for packed in plan.packed:
        index = rows.few_in(packed)
        if packed not in bound and len(index) and (packed.place is None or bool((index >= 0).any())):
            step.products[packed.form, packed.batch.kernel] += 1
            _add_few(packed, index, rows, step, step.few(x, flat, rows), y)
        for variant, start, stop in rows.bulk:
            held = packed.by_variant.get(variant)
            if held is not None:
                step.products[packed.form, "decoded"] += 1
                held.add(flat[start:stop], y[start:stop])
    if plan.factors is not None and plan.factors not in bound and len(rows.owner):
        step.products[Factors.form, "torch"] += 1
        a, b, owners = plan.factors.stacked
        some = flat if rows.owned is None else flat.index_select(0, rows.owned)
        # Filled instead of multiplied by 0, since another variant's factors may be so large that they give infinities
        # here.
        inner = (some.to(a.dtype) @ a.T).masked_fill_(rows.foreign(owners), 0.0)
        _add_to(y, rows.owned, inner @ b)
    if plan.dense:
        for variant, start, stop in rows.spans:
            if variant in plan.dense:
                matrix = plan.dense[variant].matrix
                y[start:stop] += flat[start:stop].to(matrix.dtype) @ matrix.T
    if plan.biases is not None and len(rows.owner):
        _add_to(y, rows.owned, plan.biases.index_select(0, rows.owner))


def _add_few(
    packed: Packed, index: IndexArray, rows: Segments, step: StepRows, some: Tensor, y: Tensor
) -> None:
    batch = packed.batch
    direct = rows.few is None and y.dtype == torch.float32 and (batch.any_stride or y.is_contiguous())
    target = y if direct else torch.zeros(len(some), y.shape[1], device=y.device)
    tables = step.tables(batch, some)
    if tables is None:
        batch.add(some, index, target, step.path)
    else:
        batch.add(some, index, target, step.path, tables)
    if not direct:
        _add_to(y, rows.few, target)


def add_embedding(
    target: TargetModule, plan: ModulePlan, step: StepRows, ids: Tensor, output: Tensor
) -> None:
    """Add the terms of an embedding of ``ids`` to ``output`` ``[..., hidden]``."""
    flat, y = ids.reshape(-1), output.view(-1, output.shape[-1])
    for packed in plan.packed:
        assert isinstance(packed.batch, SignBatch)
        direct = y.dtype == torch.float32 and target.multiplier == 1.0
        to = y if direct else torch.zeros(y.shape, dtype=torch.float32)
        packed.batch.add_rows(step.body.all_in(packed), flat, to)
        if not direct:
            y += to * target.multiplier
    for variant, start, stop in step.body.spans if plan.lookups else ():
        weight = plan.lookups.get(variant)
        if weight is not None:
            term = weight.rows(flat[start:stop])
            y[start:stop] += term if target.multiplier == 1.0 else term * target.multiplier


def add_norm(target: TargetModule, plan: ModulePlan, step: StepRows, x: Tensor, output: Tensor) -> None:
    """Add the terms of a norm of ``x`` to ``output``."""
    rows = step.head if target.head else step.body
    # On the general path, requests that decode one token each are the rows of a batch.
    axis = target.token_axis if x.shape[target.token_axis] == rows.total else 0
    tokens, y = x.movedim(axis, 0), output.movedim(axis, 0)
    some = tokens if rows.owned is None else tokens.index_select(0, rows.owned)
    middle = (1,) * (some.ndim - 2)
    term: Tensor | float = 0.0
    if plan.vectors is not None:
        deltas = plan.vectors.index_select(0, rows.owner).reshape(len(some), *middle, -1)
        term = normal_form(some, target.normalised, target.eps).mul_(deltas)
    if plan.biases is not None:
        term = (
            plan.biases.index_select(0, rows.owner).reshape(len(some), *middle, -1).expand(some.shape) + term
        )
    assert isinstance(term, Tensor)
    _add_to(y, rows.owned, term)


def _add_to(y: Tensor, rows: Tensor | None, term: Tensor) -> None:
    """Add in the wider of the two dtypes, then round to ``y``'s."""
    if rows is None:
        y += term
    else:
        y[rows] = (y[rows] + term).to(y.dtype)
