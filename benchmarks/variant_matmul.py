"""One 4096 x 4096 layer whose batch holds many one-bit variants: what a variant of its own costs every row.

    python benchmarks/variant_matmul.py [--quick] [--json] [--plot FILE]

Row b of a batch of B uses variant b modulo 8. Measured side by side, turn by turn, in one process: the base alone in
float32 and bfloat16; eight dense bfloat16 models instead; variants unpacked to floats for every batch; what the
kernels add to the base, exact and by look-up; and how long reading the variants' bits takes at memory speed. A figure
is the median of its turns. Ratios count, not milliseconds: times drift with the machine and its other guests.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import torch
from _report import Report, options
from gym_quant import kernels
from gym_quant.kernels import SignMatrix, signed_matmul
from rich.console import Console
from rich.table import Table
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
EXACT, LOOKUP, FLOOR = "extra cost, exact", "extra cost, look-up", "floor: bits at memory speed"
ROWS = (*BASES, DENSE, UNPACK, EXACT, LOOKUP, FLOOR)
TOTALS = {"exact": "base bf16 with exact", "lookup": "base bf16 with look-up"}

Times = dict[str, float]


def main() -> None:
    """Measure every batch size, print the table, judge the aims."""
    arguments = options(__doc__.splitlines()[0]).parse_args()
    turns = QUICK_TURNS if arguments.quick else TURNS
    torch.manual_seed(0)
    layer = Layer()
    read = read_bytes_a_second(turns)
    times = {batch: measure_batch(layer, batch, turns, read) for batch in BATCHES}
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(serving_table(times))
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
    console.print(
        f"kernels: {kernels.describe()}; {torch.get_num_threads()} threads; memory reads {read / 1e9:.1f} GB/s; {load}"
    )
    report(times, read).finish(arguments)


class Layer:
    """The base's weights, eight dense models, and eight variants, all of random numbers."""

    def __init__(self) -> None:
        self.fp32 = torch.randn(SIZE, SIZE)
        self.bf16 = self.fp32.bfloat16()
        self.dense = [self.bf16.clone() for _ in range(VARIANTS)]
        self.variants = [self._variant() for _ in range(VARIANTS)]

    @staticmethod
    def _variant() -> SignMatrix:
        bits, scales = kernels.encode_signs(torch.randn(SIZE, SIZE), None)
        return SignMatrix(bits, scales, SIZE)


def measure_batch(layer: Layer, batch: int, turns: int, read: float) -> Times:
    """Milliseconds of every row of the table, and of base and extra cost together."""
    x = torch.randn(batch, SIZE).bfloat16()
    wide, y = x.float(), torch.zeros(batch, SIZE)
    index = [row % VARIANTS for row in range(batch)]

    def together(mode: str) -> Tensor:
        return signed_matmul(x, layer.variants, index, linear(x, layer.bf16).float(), mode)

    found = in_turns(
        {
            "base fp32": lambda: linear(wide, layer.fp32),
            "base bf16": lambda: linear(x, layer.bf16),
            EXACT: lambda: signed_matmul(wide, layer.variants, index, y, "exact"),
            LOOKUP: lambda: signed_matmul(wide, layer.variants, index, y, "lookup"),
            DENSE: lambda: dense_models(layer, x),
            TOTALS["exact"]: lambda: together("exact"),
            TOTALS["lookup"]: lambda: together("lookup"),
        },
        turns,
    )
    if batch <= VARIANTS:
        found |= in_turns({UNPACK: lambda: unpacked(layer, wide, index)}, min(turns, SLOW_TURNS))
    used = min(batch, VARIANTS)
    found[FLOOR] = 1e3 * used * layer.variants[0].bits.numel() / read
    return found


def dense_models(layer: Layer, x: Tensor) -> None:
    """Every model multiplies its own rows."""
    for number in range(min(VARIANTS, len(x))):
        linear(x[number::VARIANTS], layer.dense[number])


def unpacked(layer: Layer, x: Tensor, index: list[int]) -> None:
    """What one does without kernels: bits to floats by torch, then a matmul, for every row."""
    with kernels.using("torch"):
        for row, variant in enumerate(index):
            matrix = layer.variants[variant]
            linear(x[row : row + 1], kernels.decode_signs(matrix.bits, matrix.scales, SIZE))


def in_turns(functions: Mapping[str, Callable[[], object]], turns: int) -> Times:
    """Median milliseconds of each function, run one after another so that a slow moment meets all alike."""
    seen: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(turns + 1):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if turn:  # the first warms up
                seen[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in seen.items()}


def read_bytes_a_second(turns: int) -> float:
    """How fast memory larger than the caches is read: torch sums it."""
    buffer = torch.ones(READ_MIB << 18)
    milliseconds = in_turns({"sum": buffer.sum}, turns)["sum"]
    return buffer.numel() * buffer.element_size() / (milliseconds / 1e3)


def serving_table(times: dict[int, Times]) -> Table:
    """The table as TARGETS has it: milliseconds by batch size."""
    table = Table(title=f"one {SIZE} x {SIZE} layer, ms", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for batch in times:
        table.add_column(f"B={batch}", justify="right")
    for row in (*ROWS, *TOTALS.values()):
        table.add_row(row, *(f"{t[row]:.3g}" if row in t else "-" for t in times.values()))
    return table


def report(times: dict[int, Times], read: float) -> Report:
    """Totals against eight dense models, every cell as a figure, and the aims."""
    made = Report("variant_matmul", peer="eight dense models (bf16)")
    for batch, found in times.items():
        for total in TOTALS.values():
            made.compare(f"B={batch}, {total}", found[total], found[DENSE], unit="ms")
        for row in ROWS:
            if row in found:
                made.figure("_".join(re.findall(r"\w+", f"b{batch} {row} ms".lower())), found[row])
        # What the kernels could reach at best: a base whose variants cost nothing.
        made.figure(f"b{batch}_dense_models_over_base_alone", found[DENSE] / found["base bf16"])
    made.figure("memory_read_gb_s", read / 1e9)
    eight, many = times[8], times[32]
    for mode, limit in (("lookup", 1.5), ("exact", 2.2)):
        share = eight[TOTALS[mode]] / eight["base bf16"]
        made.aim(f"B=8, {TOTALS[mode]}: times the base", figure=share, aim=limit, better="lower")
        # Where bfloat16 has no instructions it is slower than float32, and a share of it flatters.
        faster = min(eight[name] for name in BASES)
        extra = eight[LOOKUP if mode == "lookup" else EXACT]
        name = f"B=8, the faster base and {mode}: times that base"
        made.aim(name, figure=(faster + extra) / faster, aim=limit, better="lower")
    made.aim(
        "B=8, look-up: times faster than dense models",
        figure=eight[DENSE] / eight[TOTALS["lookup"]],
        aim=7.0,
        better="higher",
    )
    share = many[TOTALS["lookup"]] / many["base bf16"]
    made.aim("B=32, base bf16 with look-up: times the base", figure=share, aim=2.0, better="lower")
    return made


if __name__ == "__main__":
    main()
