"""The variants of each step: which are active, which rows are theirs, and how often their deltas were multiplied."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import torch
from gym_quant.kernels import dispatch
from gym_quant.kernels.lookup import MODES
from gym_quant.kernels.resident import ResidentSigns
from gym_quant.resident import ResidentFactors, ResidentLevels

from gym_fed.serving.forward.active_variants import ActiveVariants
from gym_fed.serving.forward.loaded import LoadedVariant
from gym_fed.serving.forward.segments import Segments, StepRows
from gym_fed.serving.forward.target_modules import ModelLayout

_BULK_ROWS = {"cpu": 512}
"""From this many rows of one variant on, the kernel ``exact`` decodes its bits for a dense product. On a CPU it is as
fast up to 256 rows (4096 x 4096, bfloat16, one core: 64 rows 37 ms against 59, 256 rows 112 against 122); by look-up
512 rows take 21 ms where a bfloat16 product of the base takes 82."""
_BULK_ROWS_ELSEWHERE = 32


class StepVariants:
    """Those of one model's steps.

    Args:
        layout: Of the model.

    Attributes:
        bulk_rows: Rows of one variant from which on they are multiplied as a whole.
        products: As ``MultiVariantModel.products``.
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
        """The rows of a step; None where all are of the base.

        Args:
            parts: Of each run of rows in order its variant, tokens, and rows of logits.
            merge: Whether products with base and delta may be made at once where all rows are of one variant.
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
        """Products of sign deltas by kernel."""
        return {kernel: self.products[ResidentSigns.form, kernel] for kernel in (*MODES, "decoded")}

    def packed_products(self) -> dict[str, int]:
        """Products of all other packed deltas by form, without those of factors."""
        found = Counter({ResidentLevels.form: 0})
        for (form, _), count in dict(self.products).items():
            if form not in (ResidentSigns.form, ResidentFactors.form):
                found[form] += count
        return dict(found)
