"""One 4096 x 4096 layer whose batch holds many one-bit variants: what a variant of its own costs every row.

    python benchmarks/variant_matmul.py [--quick] [--json] [--plot FILE]

Row b of a batch of B uses variant b modulo 8. The following are measured in turns in one process: the base alone in
float32 and bfloat16; eight dense bfloat16 models; variants unpacked to floats for every batch; the cost that the
kernels add to the base, exact and by look-up with 8 and 16 bits; and the time of reading as many bytes from memory as
the variants' bits. Every turn uses the next of several layers, so that no bits are cached. The script asserts that
native code multiplies, and with which kernel. A figure is the median of its turns. Ratios matter more than
milliseconds, since times vary with the machine and its load.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count

import numpy as np
import torch
from _peer import clocked
from _report import Report, key, load, options, show
from gym_quant import kernels
from gym_quant.kernels import ResidentSigns, SignBatch, SignMatrix
from torch import Tensor
from torch.nn.functional import linear

SIZE = 4096
VARIANTS = 8
BATCHES = (1, 8, 32)
TURNS, QUICK_TURNS = 40, 7
SLOW_TURNS = 3
READ_MIB = 256
BASES = ("base fp32", "base bf16")
DENSE, UNPACK = "eight dense models (bf16)", "unpack, then matmul (torch)"
EXTRA = {
    "exact": "extra cost, exact",
    "lookup": "extra cost, look-up",
    "lookup16": "extra cost, look-up in 16 bits",
}
FLOOR = "floor: as many bytes from memory"
ROWS = (*BASES, DENSE, UNPACK, *EXTRA.values(), FLOOR)
TOTALS = {
    "exact": "base bf16 with exact",
    "lookup": "base bf16 with look-up",
    "lookup16": "base bf16 with look-up in 16 bits",
}
LAYERS = 10
"""Number of layers, whose variants have 160 MiB of bits, more than the caches hold."""

Times = dict[str, float]


def main() -> None:
    arguments = options(__doc__).parse_args()
    turns = QUICK_TURNS if arguments.quick else TURNS
    torch.manual_seed(0)
    layer = Layer()
    times = {batch: measure_batch(layer, batch, turns) for batch in BATCHES}
    read = VARIANTS * layer.bytes_of_bits / (times[VARIANTS][FLOOR] / 1e3)
    note = f"kernels: {kernels.describe()}; {torch.get_num_threads()} threads; memory reads {read / 1e9:.1f} GB/s"
    rows = [
        [row, *(f"{t[row]:.3g}" if row in t else "-" for t in times.values())]
        for row in (*ROWS, *TOTALS.values())
    ]
    show(f"one {SIZE} x {SIZE} layer, ms", ("", *(f"B={b}" for b in times)), rows, f"{note}; {load()}")
    report(times, read).finish(arguments)


class Layer:
    """The base's weights, eight dense models, and eight variants for each of several layers, all random."""

    def __init__(self) -> None:
        self.fp32 = torch.randn(SIZE, SIZE)
        self.bf16 = self.fp32.bfloat16()
        self.dense = [self.bf16.clone() for _ in range(VARIANTS)]
        self.matrix = self._matrix()
        self.bytes_of_bits = self.matrix.bits.numel()
        self.memory = torch.ones(READ_MIB << 18)
        held = [[ResidentSigns.of(self._matrix()) for _ in range(VARIANTS)] for _ in range(LAYERS)]
        self.batches = {mode: [SignBatch(one, mode) for one in held] for mode in EXTRA}
        for mode, batches in self.batches.items():
            if not all(batch.native and batch.kernel == mode for batch in batches):
                raise RuntimeError(f"no native code for {mode}: {kernels.describe()}")

    @staticmethod
    def _matrix() -> SignMatrix:
        bits = torch.randint(0, 256, (SIZE, SIZE // 8), dtype=torch.uint8)
        return SignMatrix(bits, torch.full((1,), 1e-3), SIZE)


def measure_batch(layer: Layer, batch: int, turns: int) -> Times:
    """Return the milliseconds of every row of the table, and of base and extra cost together."""
    x = torch.randn(batch, SIZE).bfloat16()
    wide, y = x.float(), torch.zeros(batch, SIZE)
    index = np.arange(batch, dtype=np.int64) % VARIANTS
    used, layers = min(batch, VARIANTS), count()
    size = used * layer.bytes_of_bits // 4
    pieces = layer.memory.numel() // size

    def extra(mode: str) -> None:
        layer.batches[mode][next(layers) % LAYERS].add(wide, index, y)

    def together(mode: str) -> None:
        total = linear(x, layer.bf16).float()
        layer.batches[mode][next(layers) % LAYERS].add(wide, index, total)

    def read() -> None:
        start = next(layers) % pieces * size
        layer.memory[start : start + size].sum()

    functions: dict[str, Callable[[], object]] = {
        "base fp32": lambda: linear(wide, layer.fp32),
        "base bf16": lambda: linear(x, layer.bf16),
        DENSE: lambda: dense_models(layer, x),
        FLOOR: read,
    }
    for mode in EXTRA:
        functions[EXTRA[mode]] = partial(extra, mode)
        functions[TOTALS[mode]] = partial(together, mode)
    found = milliseconds(functions, turns)
    if batch <= VARIANTS:
        unpack = {UNPACK: lambda: unpacked(layer, wide, len(index))}
        found |= milliseconds(unpack, min(turns, SLOW_TURNS))
    return found


def milliseconds(functions: Mapping[str, Callable[[], object]], turns: int) -> Times:
    seen = clocked(functions, turns, time.perf_counter)
    return {name: 1e3 * statistics.median(seconds) for name, seconds in seen.items()}


def dense_models(layer: Layer, x: Tensor) -> None:
    for number in range(min(VARIANTS, len(x))):
        linear(x[number::VARIANTS], layer.dense[number])


def unpacked(layer: Layer, x: Tensor, rows: int) -> None:
    """Run the baseline without kernels, which unpacks bits to floats with torch and multiplies, for every row."""
    with kernels.using("torch"):
        for row in range(rows):
            decoded = kernels.decode_signs(layer.matrix.bits, layer.matrix.scales, SIZE)
            linear(x[row : row + 1], decoded)


def report(times: dict[int, Times], read: float) -> Report:
    """Return a report of totals compared with eight dense models, with all cells as figures, and the aims."""
    made = Report("variant_matmul", peer="eight dense models (bf16)")
    for batch, found in times.items():
        for total in TOTALS.values():
            made.compare(f"B={batch}, {total}", found[total], found[DENSE], unit="ms")
        for row in ROWS:
            if row in found:
                made.figure(key(f"b{batch} {row} ms"), found[row])
        # upper bound for the kernels: variants that cost nothing
        made.figure(f"b{batch}_dense_models_over_base_alone", found[DENSE] / found["base bf16"])
    made.figure("memory_read_gb_s", read / 1e9)
    eight, many = times[8], times[32]
    made.aim(
        "B=8, look-up: share of the memory's speed",
        eight[FLOOR] / eight[EXTRA["lookup"]],
        0.85,
        better="higher",
    )
    made.figure("b8_lookup16_share_of_the_memory_s_speed", eight[FLOOR] / eight[EXTRA["lookup16"]])
    for mode, limit in (("lookup", 1.5), ("exact", 2.2)):
        share = eight[TOTALS[mode]] / eight["base bf16"]
        made.aim(f"B=8, {TOTALS[mode]}: times the base", share, limit)
        # On CPUs without bfloat16 instructions, the bfloat16 base is slow and a ratio to it would be misleading.
        faster = min(eight[name] for name in BASES)
        extra = eight[EXTRA[mode]]
        name = f"B=8, the faster base and {mode}: times that base"
        made.aim(name, (faster + extra) / faster, limit)
    made.aim(
        "B=8, look-up: times faster than dense models",
        eight[DENSE] / eight[TOTALS["lookup"]],
        7.0,
        better="higher",
    )
    share = many[TOTALS["lookup"]] / many["base bf16"]
    made.aim("B=32, base bf16 with look-up: times the base", share, 2.0)
    return made


if __name__ == "__main__":
    main()
