"""Cost of secure aggregation: bytes of a masked update, masking it, and taking the masks off a round's sum.

    python benchmarks/secure_sums.py [--quick] [--json] [--plot FILE]

One tensor of ten million one-bit votes. A contributor of a round of n writes the votes under n masks, one of its own
and one against each of the others; the hub sums n files and takes n masks off. That the sum is the votes' is asserted.
The peer is the same number of masks of as many numbers from Flower's ``pseudo_rand_gen`` (SecAgg+), without a sum; its
masks are of 32 bits of entropy, ours of 256. CPU seconds of one process, the sides in turns, least and most of three.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from _peer import clocked
from _report import Report, options

import gym_fed.core.library_env  # noqa: F401  (sets Flower's environment before its first import)
from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.privacy.secure_aggregation.keys import Mask
from gym_fed.privacy.secure_aggregation.votes import bits_for, signs, sum_masked, write_masked

CONTRIBUTORS, QUICK_CONTRIBUTORS = (4, 10, 30), (4,)
ROWS, QUICK_ROWS, COLUMNS = 2500, 250, 4000
RUNS = 3
SUMMED = 3
"""Files that are made in full for the check; the others of a round repeat one of them under other masks."""


def main() -> None:
    arguments: argparse.Namespace = options(__doc__).parse_args()
    torch.set_num_threads(1)
    report = Report("secure_sums", peer="Flower's masks")
    rows = QUICK_ROWS if arguments.quick else ROWS
    with tempfile.TemporaryDirectory(prefix="gym-secure-") as name:
        for n in QUICK_CONTRIBUTORS if arguments.quick else CONTRIBUTORS:
            measure(report, Path(name), n, rows)
    report.finish(arguments)


def measure(report: Report, folder: Path, n: int, rows: int) -> None:
    """One round of ``n`` contributors who all stay."""
    base = {"weight": torch.zeros(rows, COLUMNS)}
    spec = BaseSpec.of(base, "ten million votes")
    bits = bits_for(n)
    deltas = []
    for index in range(SUMMED):
        generator = torch.Generator().manual_seed(index)
        tuned = {"weight": torch.randn(rows, COLUMNS, generator=generator)}
        path = folder / f"{n}-{index}.gymdelta"
        encode_delta(tuned, base, CodecPolicy(codec="bitdelta", error_feedback=False), path, spec)
        deltas.append(path)
    own = [secrets.token_bytes(32) for _ in range(n)]
    pair = {(i, j): secrets.token_bytes(32) for i in range(n) for j in range(i + 1, n)}
    files = [folder / f"{n}-{index}.votes" for index in range(n)]

    def masks_of(index: int) -> list[Mask]:
        others = [
            Mask(pair[min(index, j), max(index, j)], negative=index > j) for j in range(n) if j != index
        ]
        return [Mask(own[index]), *others]

    def mask(index: int) -> None:
        with DeltaFile.open(deltas[index % SUMMED]) as delta:
            write_masked(delta, spec, masks_of(index), bits, files[index])

    def unmask() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int16]]]:
        return dict(sum_masked(files, spec, [Mask(key).inverse for key in own], bits))

    for index in range(n):
        mask(index)
    expected = np.zeros(rows * COLUMNS, np.int16)
    for index in range(n):
        with DeltaFile.open(deltas[index % SUMMED]) as delta:
            expected += signs(delta, "weight", spec)
    if not np.array_equal(unmask()["weight"], expected):
        raise AssertionError(f"{n} contributors: the masks do not cancel")

    sides: dict[str, Callable[[], object]] = {
        "masking": lambda: mask(0),
        "unmasking": unmask,
        "flower": lambda: flower_masks(n, rows * COLUMNS, bits),
    }
    masking, unmasking, flower = clocked(sides, RUNS).values()
    size, plain = files[0].stat().st_size, deltas[0].stat().st_size
    report.compare(f"{n} contributors: masks of one update", min(masking), min(flower), unit="CPU s")
    report.compare(f"{n} contributors: unmasking the round's sum", min(unmasking), unit="CPU s")
    report.compare(f"{n} contributors: one update", size / 1e6, unit="MB")
    report.compare(f"{n} contributors: the same update, not masked", plain / 1e6, unit="MB")
    for what, seconds in (("masking", masking), ("unmasking", unmasking), ("flower", flower)):
        report.figure(f"{n}_{what}_most_cpu_s", max(seconds))
    report.figure(f"{n}_bits_a_weight", bits)


def flower_masks(n: int, size: int, bits: int) -> None:
    """``n`` masks of ``size`` numbers by Flower, added up."""
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    total = np.zeros(size, np.int64)
    for _ in range(n):
        total += pseudo_rand_gen(secrets.token_bytes(32), 1 << bits, [(size,)])[0]


if __name__ == "__main__":
    main()
