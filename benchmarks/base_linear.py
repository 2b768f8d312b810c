"""The linear layers of a base model by packed weights: time for 1 to 512 rows, and the share of memory's speed.

    python benchmarks/base_linear.py [--quick] [--json] [--plot FILE]

The layers are those of SmolLM2-135M (30 decoder layers, q/k/v and gate/up fused) and one decoder layer of a 7B model,
with random weights; together they are larger than the caches. --quick takes 10 of the 30 and no 7B. The peers are
torch's own `linear` in bfloat16 and in float32. All run on one thread, one after the other in every turn, so that a
slow moment meets all alike. Times are CPU time of the process, the median of the turns: what other processes of the
machine compute is left out, but not that they use its memory. The share is that of the bytes that a product reads, at
the speed at which torch sums a buffer larger than the caches in the same turns. Which kernel ran is asserted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _peer import clocked
from _report import Report, key, load, options, show
from gym_quant import kernels
from gym_quant.kernels import native
from gym_quant.kernels.linear import last_linear_kernel
from gym_quant.linear import PackedLinear, get_linear
from torch import Tensor
from torch.nn.functional import linear

BLOCKS = {
    "SmolLM2": [(960, 576), (576, 576), (3072, 576), (576, 1536)],
    "7B": [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)],
}
"""(out, in) of one decoder layer."""
ROWS, QUICK_ROWS = (1, 2, 4, 8, 16, 32, 128, 512), (1, 8, 128)
TURNS, QUICK_TURNS = 9, 3
MANY = 128
"""From so many rows on a third of the turns must do."""
READ_MIB = 256
PACKED = {
    "bfloat16": ("bfloat16", None),
    "int8": ("int8", None),
    "int8 g16": ("int8", 16),
    "int4": ("int4", None),
}
BFLOAT16, FLOAT32, READ = "torch bfloat16", "torch float32", "read"

Times = dict[tuple[str, int], float]
"""Median milliseconds by name and rows."""


@dataclass
class Layers:
    """Layers of one model in every form."""

    shapes: list[tuple[int, int]]
    packed: dict[str, list[PackedLinear]]
    dense: dict[str, list[Tensor]]

    @classmethod
    def of(cls, shapes: list[tuple[int, int]]) -> Layers:
        made = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=made) * 0.02 for shape in shapes]
        packed = {
            name: [get_linear(f).pack(w, group) for w in weights] for name, (f, group) in PACKED.items()
        }
        return cls(shapes, packed, {FLOAT32: weights, BFLOAT16: [w.bfloat16() for w in weights]})

    def bytes_of(self, name: str) -> int:
        if name in self.packed:
            return sum(layer.nbytes for layer in self.packed[name])
        return sum(weight.nbytes for weight in self.dense[name])

    def runs(self, rows: int) -> dict[str, Callable[[], None]]:
        """One pass through all layers, by name."""
        inputs = {cols: torch.randn(rows, cols) for _, cols in self.shapes}
        outputs = {out: torch.empty(rows, out) for out, _ in self.shapes}

        def packed(name: str) -> None:
            for layer in self.packed[name]:
                layer.multiply(inputs[layer.cols], outputs[layer.rows])

        def in_float32() -> None:
            for weight in self.dense[FLOAT32]:
                linear(inputs[weight.shape[1]], weight)

        def in_bfloat16() -> None:
            for weight in self.dense[BFLOAT16]:
                linear(inputs[weight.shape[1]].bfloat16(), weight).float()

        ours = {name: lambda name=name: packed(name) for name in self.packed}
        return {BFLOAT16: in_bfloat16, FLOAT32: in_float32, **ours}


def main() -> None:
    arguments = options(__doc__).parse_args()
    torch.set_num_threads(1)
    report = Report("base_linear", peer=BFLOAT16)
    models = {"SmolLM2": BLOCKS["SmolLM2"] * (10 if arguments.quick else 30)}
    if not arguments.quick:
        models["7B"] = BLOCKS["7B"]
    for model, shapes in models.items():
        layers = Layers.of(shapes)
        times = measure(
            layers, QUICK_ROWS if arguments.quick else ROWS, QUICK_TURNS if arguments.quick else TURNS
        )
        table(model, layers, times)
        add(report, model, layers, times)
    report.finish(arguments)


def measure(layers: Layers, rows: tuple[int, ...], turns: int) -> Times:
    """Every form in turns; after the first pass of each form, that the expected kernel computed it."""
    buffer = torch.ones(READ_MIB << 18)
    found: Times = {}
    for n in rows:
        runs: dict[str, Callable[[], object]] = {READ: buffer.sum, **layers.runs(n)}

        def require_kernel(name: str, n: int = n) -> None:
            if name in layers.packed and kernels.path() != "torch":
                wanted = expected_kernel(layers.packed[name][0], n)
                assert last_linear_kernel() == wanted, (name, n, last_linear_kernel(), wanted)

        seen = clocked(runs, turns if n < MANY else max(1, turns // 3), warmed=require_kernel)
        found |= {(name, n): 1e3 * statistics.median(values) for name, values in seen.items()}
    return found


def expected_kernel(layer: PackedLinear, rows: int) -> str:
    """The kernel that this processor and path should use, said apart from the code that picks it."""
    features, path = native.features() or 0, kernels.path()
    many = rows >= {"bfloat16": 17, "int8": 64, "int4": 32}[layer.format]
    if path != "avx512":
        return path
    if many and features & native.HAS_BF16:
        return "avx512 bfloat16"
    return "avx512 vnni" if layer.format != "bfloat16" and features & native.HAS_VNNI else "avx512"


def share(layers: Layers, times: Times, name: str, n: int) -> float:
    """Return the time to read the weights at memory speed over the time of the product."""
    rate = (READ_MIB << 20) / statistics.median(times[key] for key in times if key[0] == READ)
    return layers.bytes_of(name) / rate / times[name, n]


def table(model: str, layers: Layers, times: Times) -> None:
    """Print milliseconds of a pass by rows, bytes per weight, and the share of memory's speed at one row."""
    weights = sum(out * cols for out, cols in layers.shapes)
    rows = sorted({n for _, n in times})
    lines = [
        [
            name,
            *(f"{times[name, n]:.3g}" for n in rows),
            f"{layers.bytes_of(name) / weights:.4g}",
            f"{share(layers, times, name, 1):.0%}",
        ]
        for name in (BFLOAT16, FLOAT32, *layers.packed)
    ]
    headers = ("", *(f"{n} rows" for n in rows), "bytes/weight", "of memory's speed")
    note = f"kernels: {kernels.describe()}; one thread; {load()}"
    show(f"{model}: {weights / 1e6:.0f}M weights, ms", headers, lines, note)


def add(report: Report, model: str, layers: Layers, times: Times) -> None:
    """Rows against torch's bfloat16, all figures, and the aims."""
    last = max(n for _, n in times)
    for name in layers.packed:
        for n in (1, 8, last):
            report.compare(f"{model}, {name}, {n} rows", times[name, n], times[BFLOAT16, n], unit="ms")
        report.figure(key(f"{model} {name} share of memory speed"), share(layers, times, name, 1))
        part = f"{model}, {name}"
        one = share(layers, times, name, 1)
        report.aim(f"{part}, 1 row: share of memory's speed", one, 0.85, better="higher")
        prompt = times[BFLOAT16, last] / times[name, last]
        report.aim(f"{part}, {last} rows: times faster than {BFLOAT16}", prompt, 1.0, better="higher")
    for (name, n), value in times.items():
        if name in (FLOAT32, READ) or n not in (1, 8, last):
            report.figure(key(f"{model} {name} {n} rows all ms"), value)


if __name__ == "__main__":
    main()
