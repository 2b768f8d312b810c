"""The active variants of a step, the segments of rows that belong to each, and the hooks that add their terms.

The base's weights are only read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gym_quant import CodecError
from gym_quant.resident import IndexArray, Resident, ResidentBatch
from torch import Tensor, nn

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.forward.loaded import LoadedVariant, VariantWeight
from gym_fed.serving.forward.merged import MergedWeights
from gym_fed.serving.forward.target_modules import ModelLayout, TargetModule, normal_form
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


@dataclass(eq=False)
class Segments:
    """The rows of each variant at a module: of all tokens of a step, or of those whose logits are computed.

    Attributes:
        spans: Variant's number, first row, row after the last; rows of the base are in none.
        total: Number of rows.
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
        """``[owned rows, ranks] bool``: true where a rank belongs to another variant than the row."""
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


@dataclass
class StepRows:
    """The step that is being computed: its active variants and their segments."""

    active: ActiveVariants
    body: Segments
    head: Segments
    path: str
    """Of the sign kernels."""
    products: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Multiplications of packed deltas by form and way; ``decoded`` for a bulk span."""
    merged: MergedWeights | None = None
    """Where all rows are of the only variant, and its products may be made at once with the base's."""
    product: Tensor | None = None
    """Of the linear layer that is being computed, where it is made so."""
    _given: Tensor | None = None
    _few: Tensor | None = None

    def few(self, x: Tensor, flat: Tensor, rows: Segments) -> Tensor:
        """The rows that are multiplied one by one, float32. Query, key and value share them, as they share an input."""
        if self._given is not x or self._few is None:
            some = flat if rows.few is None else flat.index_select(0, rows.few)
            self._given, self._few = x, some.to(torch.float32).contiguous()
        return self._few


class VariantLayers:
    """The hooks of one model. Without ``rows`` they return at once."""

    def __init__(self, model: nn.Module, layout: ModelLayout) -> None:
        self.rows: StepRows | None = None
        self._handles = []
        for target in layout.target_modules:
            module = model.get_submodule(target.module)
            if target.kind == "linear":
                self._handles.append(module.register_forward_pre_hook(self._before_linear(target)))
            self._handles.append(module.register_forward_hook(self._hook(target)))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_linear(self, target: TargetModule) -> Any:
        """Leaves the module no rows where base and delta are multiplied at once."""

        def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
            rows = self.rows
            if rows is None or rows.merged is None or target.weight is None:
                return None
            delta = rows.active.variants[0].weights.get(target.weight)
            rows.product = rows.merged.product(target.module, module, delta, args[0])
            return None if rows.product is None else (args[0][:, :0],)

        return hook

    def _hook(self, target: TargetModule) -> Any:
        add = {"linear": _add_linear, "embedding": _add_embedding, "norm": _add_norm}[target.kind]

        def hook(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            rows = self.rows
            if rows is None:
                return None
            plan = rows.active.plan(target)
            if plan is None:
                return None
            product, rows.product = rows.product, None
            if product is None:
                add(target, plan, rows, args[0], output)
            else:
                _add_to_merged(plan, rows, product)
            return product

        return hook


def _add_linear(target: TargetModule, plan: ModulePlan, step: StepRows, x: Tensor, output: Tensor) -> None:
    rows = step.head if target.head else step.body
    flat, y = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
    for packed in plan.packed:
        index = rows.few_in(packed)
        if len(index) and (packed.place is None or bool((index >= 0).any())):
            step.products[packed.form, packed.batch.kernel] += 1
            _add_few(packed, index, rows, step.few(x, flat, rows), y, step.path)
        for variant, start, stop in rows.bulk:
            held = packed.by_variant.get(variant)
            if held is not None:
                step.products[packed.form, "decoded"] += 1
                held.add(flat[start:stop], y[start:stop])
    if plan.factors is not None and len(rows.owner):
        some = flat if rows.owned is None else flat.index_select(0, rows.owned)
        # Filled, not multiplied by 0: another variant's factors may be so large that they give infinities here.
        inner = (some @ plan.factors.a.T).masked_fill_(rows.foreign(plan.factors.owners), 0.0)
        _add_to(y, rows.owned, inner @ plan.factors.b.T)
    if plan.dense:
        for variant, start, stop in rows.spans:
            if variant in plan.dense:
                y[start:stop] += flat[start:stop] @ plan.dense[variant].matrix.T
    if plan.biases is not None and len(rows.owner):
        _add_to(y, rows.owned, plan.biases.index_select(0, rows.owner))


def _add_to_merged(plan: ModulePlan, step: StepRows, product: Tensor) -> None:
    for packed in plan.packed:
        step.products[packed.form, "decoded"] += 1
    if plan.biases is not None:
        product += plan.biases[0]


def _add_few(packed: Packed, index: IndexArray, rows: Segments, some: Tensor, y: Tensor, path: str) -> None:
    batch = packed.batch
    if batch.kernel != "lookup" and rows.few is None and y.dtype == torch.float32 and y.is_contiguous():
        batch.add(some, index, y, path)
        return
    term = torch.zeros(len(some), y.shape[1], device=y.device)
    try:
        batch.add(some, index, term, path)
    except CodecError:  # look-up cannot round infinities and NaN; the other rows are still computed
        finite = torch.isfinite(some).all(dim=1)
        term.zero_()
        batch.add(some, np.where(finite.numpy(), index, -1), term, path)
        term[~finite] = float("nan")
    _add_to(y, rows.few, term)


def _add_embedding(
    target: TargetModule, plan: ModulePlan, step: StepRows, ids: Tensor, output: Tensor
) -> None:
    flat, y = ids.reshape(-1), output.view(-1, output.shape[-1])
    for variant, start, stop in step.body.spans:
        weight = plan.lookups.get(variant)
        if weight is not None:
            term = weight.rows(flat[start:stop])
            y[start:stop] += term if target.multiplier == 1.0 else term * target.multiplier


def _add_norm(target: TargetModule, plan: ModulePlan, step: StepRows, x: Tensor, output: Tensor) -> None:
    rows = step.body
    tokens, y = x.movedim(target.token_axis, 0), output.movedim(target.token_axis, 0)
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
    """In the wider of both number formats, then rounded to ``y``'s."""
    if rows is None:
        y += term
    else:
        y[rows] = (y[rows] + term).to(y.dtype)
