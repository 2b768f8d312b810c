"""The distinct variants of a step, and the terms that they add at each module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from gym_quant import CodecError
from gym_quant.kernels.resident import SignBatch
from gym_quant.resident import IndexArray, Resident, ResidentBatch, ResidentFactors
from torch import Tensor

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward.target_modules import ModelLayout, TargetModule
from gym_fed.serving.forward.variant_weights import (
    DenseWeight,
    FactorWeight,
    LoadedVariant,
    MergedWeights,
    PackedWeight,
    ReplacedWeight,
    VariantWeight,
    VectorWeight,
)


@dataclass(frozen=True, eq=False)
class Packed:
    """The packed deltas of a matrix that have the same form.

    ``place`` maps a variant's number in ``ActiveVariants`` (or -1) to its number in ``batch``.
    """

    form: str
    batch: ResidentBatch
    place: IndexArray | None
    by_variant: dict[int, Resident]


@dataclass(frozen=True, eq=False)
class Factors:
    """The low-rank deltas of a matrix: ``a`` ``[rank, in]`` and ``b`` ``[rank, out]`` by variant, contiguous."""

    form: ClassVar[str] = ResidentFactors.form

    pairs: dict[int, tuple[Tensor, Tensor]]

    @cached_property
    def stacked(self) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """The factors concatenated to ``[R, in]`` and ``[R, out]``, and the variant of each rank."""
        a, b = (torch.cat(factors) for factors in zip(*self.pairs.values(), strict=True))
        return a, b, tuple(v for v, (own, _) in self.pairs.items() for _ in range(len(own)))


@dataclass(frozen=True, eq=False)
class ModulePlan:
    """The terms that the active variants add at one module."""

    packed: tuple[Packed, ...]
    factors: Factors | None
    dense: dict[int, DenseWeight]
    vectors: Tensor | None
    """Deltas of a norm's weight, ``[variants, size]`` float32; zero for variants without such a delta."""
    biases: Tensor | None
    """Deltas of a bias, in the same form."""
    lookups: dict[int, VariantWeight]
    """Deltas of an embedding that are decoded variant by variant."""


class ActiveVariants:
    """The distinct variants of a step, numbered from 0; a module's plan is created on first use."""

    def __init__(self, variants: Sequence[LoadedVariant], layout: ModelLayout, bulk_rows: int) -> None:
        self.variants = tuple(variants)
        self.merged = MergedWeights(bulk_rows)
        self._weights = [variant.weights for variant in self.variants]
        self._layout = layout
        self._plans: dict[str, ModulePlan | None] = {}
        self.bound: dict[tuple[str, str], Any] = {}
        """Results of ``bound_terms``, by first module and path."""

    def plan(self, target: TargetModule) -> ModulePlan | None:
        """Return the terms at a module; None if no variant changes it."""
        try:
            return self._plans[target.module]
        except KeyError:
            plan = self._plans[target.module] = self._make(target)
            return plan

    def _make(self, target: TargetModule) -> ModulePlan | None:
        weights = self._of(target.weight)
        biases = self._of(target.bias)
        if not weights and not biases:
            return None
        if target.kind == "norm":
            return ModulePlan((), None, {}, self._stacked(weights), self._stacked(biases), {})
        if target.kind == "embedding":
            return self._embedding(weights)
        biased = self._stacked(biases) if biases else None
        factors: dict[int, FactorWeight] = {}
        dense: dict[int, DenseWeight] = {}
        for variant, weight in weights.items():
            if isinstance(weight, FactorWeight):
                factors[variant] = weight
            elif isinstance(weight, DenseWeight):
                dense[variant] = weight
        return ModulePlan(self._groups(weights), self._factors(factors), dense, None, biased, {})

    def _of(self, parameter: str | None) -> dict[int, VariantWeight]:
        if parameter is None:
            return {}
        return {
            v: weight
            for v, weights in enumerate(self._weights)
            if (weight := weights.get(parameter)) is not None and not isinstance(weight, ReplacedWeight)
        }

    def _embedding(self, weights: dict[int, VariantWeight]) -> ModulePlan:
        batches = [
            group
            for group in self._groups(weights)
            if isinstance(group.batch, SignBatch) and group.batch.native
        ]
        batched = {variant for group in batches for variant in group.by_variant}
        lookups = {
            v: FactorWeight(o.held.unpacked()) if isinstance(o, FactorWeight) else o
            for v, o in weights.items()
            if v not in batched
        }
        return ModulePlan(tuple(batches), None, {}, None, None, lookups)

    def _groups(self, weights: dict[int, VariantWeight]) -> tuple[Packed, ...]:
        packed: dict[tuple[type[Resident], str], dict[int, Resident]] = {}
        for variant, weight in weights.items():
            if isinstance(weight, PackedWeight):
                packed.setdefault((type(weight.held), weight.held.form), {})[variant] = weight.held
        return tuple(self._packed(form, deltas) for (_, form), deltas in packed.items())

    def _packed(self, form: str, deltas: dict[int, Resident]) -> Packed:
        place = None
        if len(deltas) < len(self.variants):
            place = np.full(len(self.variants) + 1, -1, dtype=np.int64)
            place[list(deltas)] = np.arange(len(deltas))
        held = list(deltas.values())
        try:
            batch = type(held[0]).batch(held, self._layout.kernel)
        except CodecError as error:
            raise GymError(
                ErrorCode.USAGE, f"{self._layout.kernel}: {error}", "load variants with this model's layout"
            ) from error
        return Packed(form, batch, place, deltas)

    def _factors(self, deltas: dict[int, FactorWeight]) -> Factors | None:
        if not deltas:
            return None
        factors = {v: o.factors(getattr(torch, self._layout.dtype)) for v, o in deltas.items()}
        return Factors({v: (a.contiguous(), b.T.contiguous()) for v, (a, b) in factors.items()})

    def _stacked(self, deltas: dict[int, VariantWeight]) -> Tensor | None:
        if not deltas:
            return None
        held = {v: o.values for v, o in deltas.items() if isinstance(o, VectorWeight)}
        if len(held) == len(self.variants):
            return torch.stack(list(held.values()))
        none = torch.zeros_like(next(iter(held.values())))
        return torch.stack([held.get(v, none) for v in range(len(self.variants))])
