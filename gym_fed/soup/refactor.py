"""Stacked LoRA factors made small again: the best adapter of a rank, and exactly what it lacks.

A soup of n adapters has the rank of all together. Its singular components come from a QR of either side and the SVD of
a small core, never from the product (``gym_quant.factors.components_of_product``); the first are the best
approximation of their rank (Eckart and Young 1936), and the others are kept as factors too, so that adapter plus
residual is the soup itself. Singhal et al. 2025, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning
of Large Language Models", keeps what averaged factors lack; what the best adapter lacks is less.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from gym_quant.factors import components_of_product
from torch import Tensor

from gym_fed.errors import ErrorCode, GymError
from gym_fed.soup.low_rank import LowRank

_LAPACK = threading.Lock()


@dataclass(frozen=True)
class Refactored:
    """A low-rank matrix in two parts that add up to it.

    Attributes:
        kept: Its best approximation of the wanted rank; of a lower one where the matrix itself has less.
        residual: The remaining components; of rank 0 where nothing is lost.
        relative_residual: Frobenius norm of the residual, as a share of the whole's; 0.0 for a matrix of zeros.
        singular_values: ``[k]`` float64 of the whole, descending; those that are rounding alone are left out.
    """

    kept: LowRank
    residual: LowRank
    relative_residual: float
    singular_values: Tensor


def refactor(low_rank: LowRank, rank: int) -> Refactored:
    """Split a low-rank matrix into its ``rank`` largest singular components and the rest, in balanced factors.

    Components below ``eps * max(rows, cols)`` of the first are what rounding left of zero, and go. LAPACK runs on one
    thread, so that the bits do not depend on their number.

    Raises:
        GymError: ``USAGE`` for a rank below 1.
    """
    if rank < 1:
        raise GymError(
            ErrorCode.USAGE, f"an adapter of rank {rank} holds nothing", "give a rank of at least 1"
        )
    if not low_rank.rank:
        return Refactored(low_rank, low_rank, 0.0, torch.zeros(0, dtype=torch.float64))
    with one_thread():
        found = components_of_product(low_rank.b, low_rank.a)
    floor = float(found.values[0]) * torch.finfo(torch.float64).eps * max(low_rank.shape)
    found = found.first(int((found.values > floor).sum()))
    squares = found.values.square().tolist()
    total = math.fsum(squares)
    return Refactored(
        LowRank(found.right[:rank], found.left[:, :rank]),
        LowRank(found.right[rank:], found.left[:, rank:]),
        math.sqrt(math.fsum(squares[rank:]) / total) if total else 0.0,
        found.values,
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """LAPACK within gives the same bits anywhere. One at a time: torch's number of threads belongs to the process."""
    with _LAPACK:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
