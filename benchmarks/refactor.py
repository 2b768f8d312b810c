"""Stacked LoRA contributions cut back to one adapter: QR and a small SVD, against the SVD of the dense product.

    python benchmarks/refactor.py [--quick] [--json] [--plot FILE]

32 contributions of rank 16 to a 4096 x 4096 weight have rank 512 together, and are cut to rank 16; with --quick, in the
same proportions, 8 to a 1024 x 1024 weight. The peer forms their product in float64 and takes its full singular value
decomposition. Both run on one thread, so that a speed does not depend on who else computes. Errors are distances in the
Frobenius norm, relative to the whole combination: of adapter plus residual (nothing should be lacking), and of the
adapter beyond what the best of its rank lacks. The error of averaging A and B apart is shown next to them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from _report import Report, options
from torch import Tensor

from gym_fed.soup.low_rank import LowRank, combine, products, refactor, rows_of

RANK = 16
SIZE, CONTRIBUTORS = 4096, 32
QUICK_SIZE, QUICK_CONTRIBUTORS = 1024, 8
TURNS = 3
AIM_TIMES, AIM_ERROR = 20.0, 1e-6

T = TypeVar("T")


def main() -> None:
    """Measure both ways on the same contributions."""
    arguments = options(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    size, count = (QUICK_SIZE, QUICK_CONTRIBUTORS) if arguments.quick else (SIZE, CONTRIBUTORS)
    report = Report("refactor", peer=f"dense SVD, torch {torch.__version__}")
    updates = contributions(size, count)
    coefficients = torch.full((count,), 1.0 / count, dtype=torch.float64)
    seconds, found = timed(lambda: refactor(combine(updates, coefficients), RANK))
    dense_seconds, (left, values, right) = timed(lambda: dense(updates, coefficients), turns=1)

    whole = (left * values) @ right
    norm = float(values.norm())
    best = float(values[RANK:].norm()) / norm
    ours = float((whole - found.kept.b @ found.kept.a).norm()) / norm - best
    theirs = float((whole - (left[:, :RANK] * values[:RANK]) @ right[:RANK]).norm()) / norm - best
    true = torch.zeros_like(whole)
    for update in updates:
        true.addmm_(update.b, update.a, alpha=1.0 / count)
    lacking = float((true - found.kept.b @ found.kept.a - found.residual.b @ found.residual.a).norm()) / norm
    apart = mean_of([u.b for u in updates]) @ mean_of([u.a for u in updates])

    report.compare(f"combine and cut to rank {RANK}", seconds, dense_seconds, unit="s")
    report.compare("adapter + residual, error", lacking, float((true - whole).norm()) / norm)
    report.compare("adapter, error beyond the best", abs(ours), abs(theirs))
    report.compare("adapter alone, error", best + ours, best + theirs)
    report.compare("A and B averaged apart, error", float((true - apart).norm()) / norm)
    report.compare("inner products of all pairs", timed(lambda: products(updates))[0], unit="s")
    stacked = combine(updates, coefficients)
    report.compare("stacked product in float32", timed(lambda: rows_of(stacked, 0, size))[0], unit="s")
    report.aim(
        "refactoring against a full SVD", figure=dense_seconds / seconds, aim=AIM_TIMES, better="higher"
    )
    report.aim("adapter + residual is the true combination", figure=lacking, aim=AIM_ERROR, better="lower")
    report.finish(arguments)


def contributions(size: int, count: int) -> list[LowRank]:
    """Factors that share something, with components that fall off, as those of trained adapters do."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    decay = 0.7 ** torch.arange(RANK, dtype=torch.float64)
    a, b = draw(RANK, size), draw(size, RANK)
    return [
        LowRank(
            (a + draw(RANK, size)).bfloat16().double(), ((b + draw(size, RANK)) * decay).bfloat16().double()
        )
        for _ in range(count)
    ]


def dense(updates: list[LowRank], coefficients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The straight way: sum the products, decompose the sum."""
    total = torch.zeros(updates[0].shape, dtype=torch.float64)
    for update, coefficient in zip(updates, coefficients.tolist(), strict=True):
        total.addmm_(update.b, update.a, alpha=coefficient)
    left, values, right = torch.linalg.svd(total, full_matrices=False)
    return left, values, right


def mean_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(dim=0)


def timed(work: Callable[[], T], turns: int = TURNS) -> tuple[float, T]:
    """Median seconds of a few turns, and the last result."""
    seconds = []
    for _ in range(turns):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), result


if __name__ == "__main__":
    main()
