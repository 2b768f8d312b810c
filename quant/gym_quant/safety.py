"""Safety projection: project a layer's delta onto the aligned subspace if it deviates too far.

Hsu et al. 2024, "Safe LoRA: the Silver Lining of Reducing Safety Risks when Fine-tuning Large Language Models"
(arXiv:2405.16833), sec. 3: with ``V = W_aligned - W_unaligned`` of a layer, the projection is ``V (V^T V)^-1 V^T`` or,
cheaply, ``C = V V^T / ||V||_F``; a delta whose cosine similarity with its own projection is below a threshold is
replaced by it. The paper applies it to LoRA's products; a delta is such a matrix too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gym_quant.codec import CodecError, check_finite

Projection = Literal["fast", "exact"]
"""The form of the projection. ``fast``: the paper's ``V V^T / ||V||_F``, whose result is also scaled by V's size.
``exact``: the orthogonal projection onto V's columns, which is the paper's first form; where V has full row rank it
changes nothing."""


@dataclass(frozen=True)
class SafetyProjection:
    """The result for a layer.

    Attributes:
        cosine: Cosine similarity of the delta with its projection; None if V (no subspace) or the delta is zero.
        replaced: True if ``delta`` is the projection.
        delta: The resulting delta, float32, in the given shape.
    """

    cosine: float | None
    replaced: bool
    delta: Tensor


@torch.no_grad()
def project_delta(
    delta: Tensor, aligned: Tensor, unaligned: Tensor, threshold: float, projection: Projection = "fast"
) -> SafetyProjection:
    """Replace a delta by its projection if its cosine is below the threshold.

    Args:
        delta: ``[out, in]``, any float dtype.
        aligned: The layer's weight in the aligned (instruction-tuned, safe) model, ``[out, in]``.
        unaligned: The layer's weight in the base that was aligned, ``[out, in]``.
        threshold: Minimum cosine similarity of an unchanged delta, 0 to 1.
        projection: Form of the projection in the paper.

    Raises:
        CodecError: For shapes that differ or are not matrices, and for values that are not finite.
    """
    if delta.ndim != 2 or not delta.shape == aligned.shape == unaligned.shape:
        shapes = ", ".join(str(list(t.shape)) for t in (delta, aligned, unaligned))
        raise CodecError(f"delta, aligned and unaligned must be matrices of one shape, not {shapes}")
    change = delta.detach().to("cpu", torch.float32)
    span = (aligned.detach().double() - unaligned.detach().double()).cpu()
    check_finite(change, "delta")
    check_finite(span, "aligned - unaligned")
    size = float(span.norm())
    if size == 0.0 or float(change.norm()) == 0.0:
        return SafetyProjection(None, False, change)
    wide = change.double()
    projected = span @ (span.T @ wide) / size if projection == "fast" else _onto_columns(span, wide)
    norms = float(wide.norm()) * float(projected.norm())
    cosine = float((wide * projected).sum()) / norms if norms else 0.0
    if cosine >= threshold:
        return SafetyProjection(cosine, False, change)
    return SafetyProjection(cosine, True, projected.to(torch.float32))


def _onto_columns(span: Tensor, values: Tensor) -> Tensor:
    """Project the columns of ``values`` orthogonally onto those of ``span``, which may have any rank."""
    basis, sizes, _ = torch.linalg.svd(span, full_matrices=False)
    tolerance = float(sizes[0]) * max(span.shape) * torch.finfo(torch.float32).eps
    directions = basis[:, sizes > tolerance]
    projected: Tensor = directions @ (directions.T @ values)
    return projected
