"""The packed and low-rank terms of modules with one input, added by native calls whose addresses are collected once.

At one row the multiplication of a layer's signs or factors takes a few microseconds, less than its Python otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gym_quant.kernels.factors import FactorMatrix, FactorTerms
from gym_quant.kernels.program import Program
from gym_quant.kernels.resident import BoundTerms, SignBatch
from torch import Tensor

from gym_fed.serving.forward.active_variants import ActiveVariants, Factors, Packed
from gym_fed.serving.forward.segments import Segments
from gym_fed.serving.forward.target_modules import TargetModule

Targets = Sequence[tuple[TargetModule, slice]]
"""Modules, and the columns of each in the common output."""
Add = Callable[[int, int, int, int, int], None]
"""Of the addresses of ``x`` and the rows' variants, with their number, and of ``y`` with its row stride."""


@dataclass(frozen=True, eq=False)
class Bound:
    """What one or two calls add.

    Attributes:
        done: The deltas that they multiply. Packed ones are for rows that are not bulk.
        signs: How often each form and kernel is among the packed ones.
        factors: The same of factors.
        rest: Modules to which the variants add more than that.
    """

    done: frozenset[Packed | Factors]
    signs: Counter[tuple[str, str]]
    factors: Counter[tuple[str, str]]
    rest: Targets
    _add_signs: Add | None
    _add_factors: Add | None
    _terms: BoundTerms | None
    _low_rank: FactorTerms | None

    def record(self, program: Program, x: Tensor, y: Tensor) -> bool:
        """Add ``add``, of rows that are none bulk, to a program; False where it cannot be."""
        if self._terms is not None and not self._terms.record(program, x, y):
            return False
        if self._low_rank is not None:
            self._low_rank.record(program, x, y)
        return True

    def add(self, x: Tensor, y: Tensor, rows: Segments, products: Counter[tuple[str, str]]) -> None:
        """Add the terms, packed ones of the rows that are not bulk.

        Args:
            x: ``[n, in]`` float32, contiguous.
            y: ``[n, out]`` float32, contiguous.
            rows: The variants of the rows.
            products: Counts them.
        """
        if self._add_signs is not None and len(rows.few_index):
            self._add_signs(x.data_ptr(), len(x), rows.few_owners_at, y.data_ptr(), y.shape[1])
            products.update(self.signs)
        if self._add_factors is not None:
            self._add_factors(x.data_ptr(), len(x), rows.owners.data_ptr(), y.data_ptr(), y.shape[1])
            products.update(self.factors)


def bound_terms(active: ActiveVariants, targets: Targets, path: str) -> Bound | None:
    """None where nothing can be bound: without native code, and for deltas that it cannot read."""
    key = targets[0][0].module, path
    if key not in active.bound:
        active.bound[key] = _bound(active, targets, path)
    found: Bound | None = active.bound[key]
    return found


def _bound(active: ActiveVariants, targets: Targets, path: str) -> Bound | None:
    if path == "torch":
        return None
    signs: list[tuple[Packed, SignBatch, int]] = []
    factors: list[tuple[Factors, FactorMatrix]] = []
    rest: list[tuple[TargetModule, slice]] = []
    for target, part in targets:
        plan = active.plan(target)
        if plan is None:
            continue
        more = bool(plan.dense) or plan.biases is not None
        for packed in plan.packed:
            if isinstance(packed.batch, SignBatch) and packed.batch.native:
                signs.append((packed, packed.batch, part.start))
            else:
                more = True
        if plan.factors is not None:
            factors.append(
                (plan.factors, FactorMatrix(part.stop - part.start, part.start, plan.factors.pairs))
            )
        if more:
            rest.append((target, part))
    if not signs and not factors:
        return None
    terms = None
    if signs:
        terms = BoundTerms(
            [batch for _, batch, _ in signs],
            [column for _, _, column in signs],
            [packed.place for packed, _, _ in signs],
        )
    low_rank = None
    if factors:
        a, _ = next(iter(factors[0][0].pairs.values()))
        low_rank = FactorTerms([matrix for _, matrix in factors], len(active.variants), a.shape[1])
    return Bound(
        frozenset([packed for packed, _, _ in signs] + [held for held, _ in factors]),
        Counter((packed.form, batch.kernel) for packed, batch, _ in signs),
        Counter({(Factors.form, "native"): len(factors)}),
        rest,
        None if terms is None else terms.bind(path),
        None if low_rank is None else low_rank.bind(path),
        terms,
        low_rank,
    )
