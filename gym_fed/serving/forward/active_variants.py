"""The active variants of a step: distinct variants, numbered, and what they add at each module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gym_quant import CodecError
from gym_quant.resident import IndexArray, Resident, ResidentBatch
from torch import Tensor

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.forward.loaded import LoadedVariant, VariantWeight
from gym_fed.serving.forward.merged import MergedWeights
from gym_fed.serving.forward.target_modules import ModelLayout, TargetModule
from gym_fed.serving.forward.variant_weights import DenseWeight, FactorWeight, PackedWeight, VectorWeight


@dataclass(frozen=True, eq=False)
class Packed:
    """Packed deltas of a matrix, all of one form.

    ``place`` maps a variant's number in ``ActiveVariants`` (or -1) to its number in ``batch``.
    """

    form: str
    batch: ResidentBatch
    place: IndexArray | None
    by_variant: dict[int, Resident]


@dataclass(frozen=True, eq=False)
class Factors:
    """Stacked factors: ``a`` ``[R, in]``, ``b`` ``[out, R]``; ``owners`` gives the variant of each rank."""

    a: Tensor
    b: Tensor
    owners: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ModulePlan:
    """The terms that the active variants add at one module."""

    packed: tuple[Packed, ...]
    factors: Factors | None
    dense: dict[int, DenseWeight]
    vectors: Tensor | None
    """Deltas of a norm's weight, ``[variants, size]`` float32; zero for those that have none."""
    biases: Tensor | None
    """Of a bias, likewise."""
    lookups: dict[int, VariantWeight]
    """Of an embedding."""


class ActiveVariants:
    """Distinct variants of a step, numbered from 0; a module's plan is made on first use."""

    def __init__(self, variants: Sequence[LoadedVariant], layout: ModelLayout, bulk_rows: int) -> None:
        self.variants = tuple(variants)
        self.merged = MergedWeights(bulk_rows)
        self._weights = [variant.weights for variant in self.variants]
        self._layout = layout
        self._plans: dict[str, ModulePlan | None] = {}
        self.bound: dict[tuple[str, str], Any] = {}
        """What ``bound_signs`` made of them, by first module and path."""

    def plan(self, target: TargetModule) -> ModulePlan | None:
        """None where no variant changes this module."""
        try:
            return self._plans[target.module]
        except KeyError:
            found = self._plans[target.module] = self._make(target)
            return found

    def _make(self, target: TargetModule) -> ModulePlan | None:
        weights = self._of(target.weight)
        biases = self._of(target.bias)
        if not weights and not biases:
            return None
        if target.kind == "norm":
            return ModulePlan((), None, {}, self._stacked(weights), self._stacked(biases), {})
        if target.kind == "embedding":
            lookups = {
                v: FactorWeight(o.held.unpacked()) if isinstance(o, FactorWeight) else o
                for v, o in weights.items()
            }
            return ModulePlan((), None, {}, None, None, lookups)
        biased = self._stacked(biases) if biases else None
        packed: dict[tuple[type[Resident], str], dict[int, Resident]] = {}
        factors: dict[int, FactorWeight] = {}
        dense: dict[int, DenseWeight] = {}
        for variant, weight in weights.items():
            if isinstance(weight, PackedWeight):
                kind = (type(weight.held), weight.held.form)
                packed.setdefault(kind, {})[variant] = weight.held
            elif isinstance(weight, FactorWeight):
                factors[variant] = weight
            elif isinstance(weight, DenseWeight):
                dense[variant] = weight
        groups = tuple(self._packed(form, found) for (_, form), found in packed.items())
        return ModulePlan(groups, self._factors(factors), dense, None, biased, {})

    def _of(self, parameter: str | None) -> dict[int, VariantWeight]:
        if parameter is None:
            return {}
        return {
            v: weight
            for v, weights in enumerate(self._weights)
            if (weight := weights.get(parameter)) is not None
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

    def _factors(self, found: dict[int, FactorWeight]) -> Factors | None:
        if not found:
            return None
        factors = [o.factors(getattr(torch, self._layout.dtype)) for o in found.values()]
        owners = tuple(v for v, (a, _) in zip(found, factors, strict=True) for _ in range(len(a)))
        return Factors(torch.cat([a for a, _ in factors]), torch.cat([b for _, b in factors], dim=1), owners)

    def _stacked(self, found: dict[int, VariantWeight]) -> Tensor | None:
        if not found:
            return None
        held = {v: o.values for v, o in found.items() if isinstance(o, VectorWeight)}
        if len(held) == len(self.variants):
            return torch.stack(list(held.values()))
        none = torch.zeros_like(next(iter(held.values())))
        return torch.stack([held.get(v, none) for v in range(len(self.variants))])
