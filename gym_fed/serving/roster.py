"""The variants of a step side by side, and which rows of the step are whose: what a mixed layer computes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gym_quant import CodecError
from gym_quant.resident import IndexArray, Resident, ResidentBatch
from torch import Tensor

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.loaded import LoadedVariant, Operand
from gym_fed.serving.model_layout import ModelLayout, Site
from gym_fed.serving.operands import DenseOperand, FactorOperand, PackedOperand, VectorOperand


@dataclass(frozen=True, eq=False)
class Packed:
    """Packed deltas of a matrix, all of one form; ``place`` takes a variant's number in the roster (or -1) to its
    number in ``batch``.
    """

    form: str
    batch: ResidentBatch
    place: IndexArray | None
    by_variant: dict[int, Resident]


@dataclass(frozen=True, eq=False)
class Factors:
    """Factors one above the other: ``a`` ``[R, in]``, ``b`` ``[out, R]``; ``owners`` says whose each rank is."""

    a: Tensor
    b: Tensor
    owners: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SitePlan:
    """What the roster's variants add at one module."""

    packed: tuple[Packed, ...]
    factors: Factors | None
    dense: dict[int, DenseOperand]
    vectors: Tensor | None
    """Deltas of a norm's weight, ``[variants, size]`` float32; zero for those that have none."""
    biases: Tensor | None
    """Of a bias, likewise."""
    lookups: dict[int, Operand]
    """Of an embedding."""


class Roster:
    """Distinct variants, numbered from 0; plans are made when a module first asks."""

    def __init__(self, variants: Sequence[LoadedVariant], layout: ModelLayout) -> None:
        self.variants = tuple(variants)
        self._operands = [variant.operands for variant in self.variants]
        self._layout = layout
        self._plans: dict[str, SitePlan | None] = {}

    def plan(self, site: Site) -> SitePlan | None:
        """None where no variant changes this module."""
        try:
            return self._plans[site.module]
        except KeyError:
            found = self._plans[site.module] = self._make(site)
            return found

    def _make(self, site: Site) -> SitePlan | None:
        weights = self._of(site.weight)
        biases = self._of(site.bias)
        if not weights and not biases:
            return None
        if site.kind == "norm":
            return SitePlan((), None, {}, self._stacked(weights), self._stacked(biases), {})
        if site.kind == "embedding":
            lookups = {
                v: FactorOperand(o.held.unpacked()) if isinstance(o, FactorOperand) else o
                for v, o in weights.items()
            }
            return SitePlan((), None, {}, None, None, lookups)
        biased = self._stacked(biases) if biases else None
        packed: dict[tuple[type[Resident], str], dict[int, Resident]] = {}
        factors: dict[int, FactorOperand] = {}
        dense: dict[int, DenseOperand] = {}
        for variant, operand in weights.items():
            if isinstance(operand, PackedOperand):
                kind = (type(operand.held), operand.held.form)
                packed.setdefault(kind, {})[variant] = operand.held
            elif isinstance(operand, FactorOperand):
                factors[variant] = operand
            elif isinstance(operand, DenseOperand):
                dense[variant] = operand
        groups = tuple(self._packed(form, found) for (_, form), found in packed.items())
        return SitePlan(groups, self._factors(factors), dense, None, biased, {})

    def _of(self, parameter: str | None) -> dict[int, Operand]:
        if parameter is None:
            return {}
        return {
            v: operand
            for v, operands in enumerate(self._operands)
            if (operand := operands.get(parameter)) is not None
        }

    def _packed(self, form: str, found: dict[int, Resident]) -> Packed:
        place = None
        if len(found) < len(self.variants):
            place = np.full(len(self.variants) + 1, -1, dtype=np.int64)
            place[list(found)] = np.arange(len(found))
        held = list(found.values())
        try:
            batch = type(held[0]).batch(held, self._layout.kernel)
        except CodecError as error:
            raise GymError(
                ErrorCode.USAGE, f"{self._layout.kernel}: {error}", "load variants with this model's layout"
            ) from error
        return Packed(form, batch, place, found)

    def _factors(self, found: dict[int, FactorOperand]) -> Factors | None:
        if not found:
            return None
        sides = [o.factors(getattr(torch, self._layout.dtype)) for o in found.values()]
        owners = tuple(v for v, (a, _) in zip(found, sides, strict=True) for _ in range(len(a)))
        return Factors(torch.cat([a for a, _ in sides]), torch.cat([b for _, b in sides], dim=1), owners)

    def _stacked(self, found: dict[int, Operand]) -> Tensor | None:
        if not found:
            return None
        held = {v: o.values for v, o in found.items() if isinstance(o, VectorOperand)}
        if len(held) == len(self.variants):
            return torch.stack(list(held.values()))
        none = torch.zeros_like(next(iter(held.values())))
        return torch.stack([held.get(v, none) for v in range(len(self.variants))])


@dataclass(eq=False)
class RowMap:
    """Whose the rows are that a module sees: all tokens of a step, or those whose logits are wanted.

    Attributes:
        spans: Variant's number, first row, row after the last; rows of the base alone are in none.
        total: Rows.
        bulk_rows: From how many rows on a span is multiplied as a whole instead of row by row.
    """

    spans: Sequence[tuple[int, int, int]]
    total: int
    bulk_rows: int
    device: torch.device
    bulk: list[tuple[int, int, int]] = field(init=False)
    few: Tensor | None = field(init=False)
    """Rows of spans that are not bulk; None: all rows of the step."""
    few_index: IndexArray = field(init=False)
    """Variant of each of them."""
    owned: Tensor | None = field(init=False)
    """Rows of all spans; None: all rows of the step."""
    owner: Tensor = field(init=False)
    """Variant of each of them."""
    _masks: dict[Any, Tensor] = field(init=False, default_factory=dict)
    _places: dict[bytes, IndexArray] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.bulk = [s for s in self.spans if s[2] - s[1] >= self.bulk_rows]
        few, few_owner = self._rows([s for s in self.spans if s[2] - s[1] < self.bulk_rows])
        owned, owner = self._rows(self.spans)
        self.few_index = few_owner
        self.few = None if len(few) == self.total else torch.from_numpy(few).to(self.device)
        self.owned = None if len(owned) == self.total else torch.from_numpy(owned).to(self.device)
        self.owner = torch.from_numpy(owner).to(self.device)

    def few_in(self, packed: Packed) -> IndexArray:
        """``few_index`` in the numbers of a layer's own batch."""
        if packed.place is None:
            return self.few_index
        key = packed.place.tobytes()
        if key not in self._places:
            self._places[key] = packed.place[self.few_index]
        return self._places[key]

    def foreign(self, owners: tuple[int, ...]) -> Tensor:
        """``[owned rows, ranks] bool``: where the rank is not of the row's variant."""
        found = self._masks.get(owners)
        if found is None:
            ranks = torch.tensor(owners, device=self.device)
            found = self.owner[:, None] != ranks[None, :]
            self._masks[owners] = found
        return found

    @staticmethod
    def _rows(spans: Sequence[tuple[int, int, int]]) -> tuple[IndexArray, IndexArray]:
        if not spans:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        rows = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
        owners = np.concatenate([np.full(stop - start, v) for v, start, stop in spans])
        return rows.astype(np.int64), owners.astype(np.int64)
