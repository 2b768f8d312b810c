"""Every codec of the registry: encode and decode speed as a share of memcpy, bits per weight, and bytes on disk.

    python benchmarks/codec_speed.py [--quick] [--json] [--plot FILE]

GB/s count the bytes of the float32 delta, which memcpy moves too (copied into a tensor that is there already), all on
one thread, so that a speed does not depend on who else computes. The peer is the straight version of the same codec
in numpy and torch, as one would write it in a few lines, without checks: clips and thresholds there are the plain
ones (largest magnitude; 0.7 of the mean), so the work is not always the same. The size is that of a ``.gymdelta``
with this one tensor. A figure is the median of its turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _report import Report, options
from _straight import STRAIGHT
from gym_quant import codec_names, get_codec, kernels
from gym_quant.codec import as_matrix
from torch import Tensor

from gym_fed.delta.base import BaseSpec
from gym_fed.delta.writer import DeltaEntry, write_delta

SIZE, QUICK_SIZE = 4096, 1024
# A full singular value decomposition grows with the third power: a smaller matrix, the speed counts its own bytes.
FACTORED_SIZE, QUICK_FACTORED_SIZE = 1024, 384
# Parameters of a codec where the default is not the usual choice, or where there is more than one usual choice.
PARAMS: dict[str, list[dict[str, Any]]] = {
    "bitdelta": [{}, {"group_size": 128}],
    "binary": [{"group_size": 128}],
    "int2": [{"group_size": 128}],
    "int4": [{"group_size": 128}],
    "lora": [{"rank": 16}],
    "ternary": [{"group_size": 128}],
}
TURNS, SECONDS = 5, 1.5
AIM = 0.4


def main() -> None:
    """Measure each codec, and memcpy next to it."""
    arguments = options(__doc__.splitlines()[0]).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    report = Report("codecs", peer="straight numpy/torch")
    for name in codec_names():
        sides = (FACTORED_SIZE, QUICK_FACTORED_SIZE) if name == "lora" else (SIZE, QUICK_SIZE)
        for params in PARAMS.get(name, [{}]):
            measure(report, name, params, sides[arguments.quick])
    measure_kernels(report, QUICK_SIZE if arguments.quick else SIZE)
    aims(report)
    report.finish(arguments)


def measure(report: Report, name: str, params: dict[str, Any], size: int) -> None:
    """Rows of one codec with one set of parameters."""
    delta = torch.randn(size, size) * 0.01
    codec, shape = get_codec(name), (size, size)
    encoded = codec.encode(delta, **params)
    straight = STRAIGHT.get(name)
    group = params.get("group_size")
    functions: dict[str, Callable[[], object]] = {
        "memcpy": copier(delta),
        "encode": lambda: codec.encode(delta, **params),
        "decode": lambda: codec.decode(encoded.payload, shape, encoded.params),
    }
    if straight is not None:
        option = params.get("rank", group)
        there = straight.encode(delta, option)
        functions["encode peer"] = lambda: straight.encode(delta, option)
        functions["decode peer"] = lambda: straight.decode(there, option)
    speeds = speeds_in_turns(functions, delta)
    form = name + "".join(f", {key} {value}" for key, value in params.items())
    for job in ("encode", "decode"):
        share = speeds[job] / speeds["memcpy"]
        report.compare(f"{form}: {job}", speeds[job], speeds.get(f"{job} peer"), unit="GB/s", better="higher")
        report.figure(key(form, job, "share_of_memcpy"), share)
    report.figure(key(form, "memcpy_gb_s"), speeds["memcpy"])
    bits = 8 * codec.payload_bytes(as_matrix(shape), encoded.params) / delta.numel()
    report.compare(f"{form}: bits per weight", bits, 32.0, unit="bit")
    report.compare(f"{form}: file", file_bytes(name, params, delta) / 1e6, delta.numel() * 4 / 1e6, unit="MB")


def measure_kernels(report: Report, size: int) -> None:
    """The one-pass kernel behind the sign codecs, from two models in bfloat16 to bits and scales."""
    tuned, base = (torch.randn(size, size).bfloat16() for _ in range(2))
    delta, out = tuned.float() - base.float(), torch.empty(size, size)
    bits, scales = kernels.encode_signs(delta, None)

    def in_torch(function: Callable[..., object], *inputs: object) -> None:
        with kernels.using("torch"):
            function(*inputs)

    speeds = speeds_in_turns(
        {
            "memcpy": copier(delta),
            "delta": lambda: kernels.encode_signs(delta, None),
            "delta peer": lambda: in_torch(kernels.encode_signs, delta, None),
            "two models": lambda: kernels.encode_signs(tuned, base),
            "two models peer": lambda: in_torch(kernels.encode_signs, tuned, base),
            "decode": lambda: kernels.decode_signs(bits, scales, size, out=out),
            "decode peer": lambda: in_torch(kernels.decode_signs, bits, scales, size),
        },
        delta,
    )
    for job, words in (
        ("delta", "encode a delta"),
        ("two models", "encode tuned - base (bf16)"),
        ("decode", "decode in place"),
    ):
        line = f"kernels ({kernels.path()}): {words}"
        report.compare(line, speeds[job], speeds[f"{job} peer"], unit="GB/s", better="higher")
        report.figure(key("kernels", words, "share_of_memcpy"), speeds[job] / speeds["memcpy"])


def aims(report: Report) -> None:
    """Encoding at 40% of the speed of memcpy, whole tensors and groups."""
    for form in ("bitdelta", "bitdelta, group_size 128"):
        share = report.figures[key(form, "encode", "share_of_memcpy")]
        report.aim(f"{form}: encode, share of memcpy's speed", figure=share, aim=AIM, better="higher")


def speeds_in_turns(functions: dict[str, Callable[[], object]], delta: Tensor) -> dict[str, float]:
    """GB/s of the delta's bytes, turn by turn so that a slow moment meets all alike; slow jobs get fewer turns."""
    seen: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(TURNS + 1):
        for name, function in functions.items():
            if sum(seen[name]) > SECONDS:
                continue
            started = time.perf_counter()
            function()
            taken = time.perf_counter() - started
            if turn or taken > SECONDS:  # the first warms up
                seen[name].append(taken)
    size = delta.numel() * delta.element_size()
    return {name: size / statistics.median(values) / 1e9 for name, values in seen.items()}


def copier(delta: Tensor) -> Callable[[], object]:
    """memcpy by torch, into memory that is there already."""
    target = torch.empty_like(delta)
    return lambda: target.copy_(delta)


def file_bytes(name: str, params: dict[str, Any], delta: Tensor) -> int:
    """Size of a ``.gymdelta`` that holds this delta alone."""
    spec = BaseSpec("benchmark", "sha256:" + "0" * 64, {"weight": tuple(delta.shape)})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "one.gymdelta"
        return write_delta(file, [DeltaEntry.of("weight", delta, name, **params)], spec).size_bytes


def key(*words: str) -> str:
    """A figure's key."""
    return "_".join("".join(c if c.isalnum() else " " for c in " ".join(words).lower()).split())


if __name__ == "__main__":
    main()
