"""The packed terms of modules with one input, added by one native call whose addresses are collected once.

At one row the multiplication of a layer's signs takes a few microseconds, less than its Python does otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gym_quant.kernels.resident import BoundTerms, SignBatch
from torch import Tensor

from gym_fed.serving.forward.active_variants import ActiveVariants, Packed
from gym_fed.serving.forward.segments import Segments
from gym_fed.serving.forward.target_modules import TargetModule

Targets = Sequence[tuple[TargetModule, slice]]
"""Modules, and the columns of each in the common output."""


@dataclass(frozen=True, eq=False)
class BoundSigns:
    """What one call adds.

    Attributes:
        packed: The deltas that it multiplies.
        counted: How often each form and kernel is among them.
        rest: Modules to which the variants add more than that.
    """

    packed: frozenset[Packed]
    counted: Counter[tuple[str, str]]
    rest: Targets
    _terms: BoundTerms
    _add: Callable[[int, int, int, int, int], None]

    def add(self, x: Tensor, y: Tensor, rows: Segments) -> None:
        """Add the terms of the rows that are not bulk.

        Args:
            x: ``[n, in]`` float32, contiguous.
            y: ``[n, out]`` float32, contiguous.
            rows: The variants of the rows.
        """
        self._add(x.data_ptr(), len(x), rows.few_owners_at, y.data_ptr(), y.shape[1])


def bound_signs(active: ActiveVariants, targets: Targets, path: str) -> BoundSigns | None:
    """None where nothing can be bound: without native code, and for deltas that it cannot read."""
    key = targets[0][0].module, path
    if key not in active.bound:
        active.bound[key] = _bound(active, targets, path)
    found: BoundSigns | None = active.bound[key]
    return found


def _bound(active: ActiveVariants, targets: Targets, path: str) -> BoundSigns | None:
    if path == "torch":
        return None
    bound: list[tuple[Packed, SignBatch, int]] = []
    rest: list[tuple[TargetModule, slice]] = []
    for target, part in targets:
        plan = active.plan(target)
        if plan is None:
            continue
        more = plan.factors is not None or bool(plan.dense) or plan.biases is not None
        for packed in plan.packed:
            if isinstance(packed.batch, SignBatch) and packed.batch.native:
                bound.append((packed, packed.batch, part.start))
            else:
                more = True
        if more:
            rest.append((target, part))
    if not bound:
        return None
    terms = BoundTerms(
        [batch for _, batch, _ in bound],
        [column for _, _, column in bound],
        [packed.place for packed, _, _ in bound],
    )
    counted = Counter((packed.form, batch.kernel) for packed, batch, _ in bound)
    return BoundSigns(frozenset(packed for packed, _, _ in bound), counted, rest, terms, terms.bind(path))
