"""Memory of a variant by codec, and the time that it adds to a step, on the layout of a real model.

    python benchmarks/resident_forms.py [--kernel KERNEL] [--quick] [--json] [--plot FILE]

The base has random weights and the sizes of SmolLM2-135M (with --quick, of gym-nano, which shows only the mechanism).
Its dtype is the one in which torch multiplies eight rows of 4096 x 4096 faster on this machine. A variant changes every
matrix, including embedding and head, with random codes. The peer is the same step with the delta decoded once to dense
matrices of that dtype, which is how codec `dense` is served. Steps are a new token of one request, of eight requests
with one variant, and a prompt of 512 tokens. All run on one thread, in turns, so that slow periods of the machine
affect all. Times are CPU time of the process, which excludes other processes on the machine; the table has median,
minimum and maximum of the turns. The script asserts from the model's counters which form and kernel multiplied.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _peer import spread
from _report import Report, options, show
from gym_quant import codec_names, get_codec, kernels
from gym_quant.codec import Payload, Shape
from gym_quant.kernels import ResidentSigns
from gym_quant.kernels.level_tiles import ResidentTiles
from torch.nn.functional import linear

from gym_fed.base.models import load_model
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.forward.variant_weights import DenseWeight, LoadedVariant, loaded_variant

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    **{name: [{}, {"group_size": 128}] for name in ("bitdelta", "ternary")},
    "binary": [{}, {"group_size": 128, "symmetric": False}],
    "int2": [{"group_size": 128, "symmetric": False}],
    "int4": [{}, {"group_size": 128}, {"group_size": 128, "symmetric": False}],
    "int8": [{}, {"group_size": 128}],
    "lora": [{"rank": 16}, {"rank": 16, "factors": "int4"}],
    "dense": [{}],
}
"""Settings of codecs with several common choices; the others run with their defaults."""
ROWS, PROMPT, CONTEXT = 8, 512, 16
STEPS = {"1 row": 1, "8 rows": ROWS, "prompt of 512": PROMPT}
TURNS, QUICK_TURNS = 5, 3


@dataclass
class Side:
    """A variant and the times of its steps, in seconds."""

    label: str
    variant: LoadedVariant
    file_bytes: int
    load_seconds: float
    seen: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STEPS})

    @property
    def dense(self) -> bool:
        return any(isinstance(weight, DenseWeight) for weight in self.variant.weights.values())


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--kernel", choices=kernels.MODES, default="lookup", help="of signs and levels")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = fastest_dtype()
    model = base_model(arguments.quick).to(dtype).eval()
    spec = BaseSpec.of(model, "base")
    with (
        tempfile.TemporaryDirectory(prefix="gym-resident-") as folder,
        MultiVariantModel(model, kernel=arguments.kernel) as served,
    ):
        sides = [
            side(served, spec, name, params, Path(folder) / "variant.gymdelta")
            for name in codec_names()
            for params in SETTINGS.get(name, [{}])
        ]
        base: dict[str, list[float]] = {name: [] for name in STEPS}
        for turn in range((QUICK_TURNS if arguments.quick else TURNS) + 1):
            for what, times in ((None, base), *((s, s.seen) for s in sides)):
                for name, seconds in steps_of(served, what).items():
                    if turn:  # the first turn is a warm-up
                        times[name].append(seconds)
    report = judged(sides, base)
    shown = "gym-nano" if arguments.quick else "SmolLM2-135M's sizes"
    rows = [["the base alone", "", "", "", "", *(spread(seconds, 1e3) for seconds in base.values())]]
    for found in sides:
        resident, file = found.variant.resident_bytes, found.file_bytes
        sizes = (
            f"{file / 1e6:.2f}",
            f"{resident / 1e6:.2f}",
            f"{resident / file:.2f}",
            f"{found.load_seconds:.2f}",
        )
        rows.append([found.label, *sizes, *(spread(seconds, 1e3) for seconds in found.seen.values())])
    headers = ("", "file MB", "resident MB", "of the file", "load s", *(f"{step}, ms" for step in STEPS))
    show(
        "a variant of every codec",
        headers,
        rows,
        f"{shown}, {spec.num_parameters:,} parameters in {str(dtype).removeprefix('torch.')}; one thread, CPU time; "
        f"kernel {arguments.kernel}: {kernels.describe()}",
    )
    report.finish(arguments)


def base_model(quick: bool) -> Any:
    """Return a base with random weights, since neither bytes nor times depend on their values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if quick:
        return load_model("gym-nano").model
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMOLLM2))


def fastest_dtype() -> torch.dtype:
    """Return the dtype in which dense matrices are multiplied faster on this machine."""
    taken = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, matrix = torch.randn(ROWS, 4096).to(dtype), torch.randn(4096, 4096).to(dtype)
        taken[dtype] = statistics.median(timed(partial(linear, x, matrix)) for _ in range(9))
    return min(taken, key=lambda dtype: taken[dtype])


def side(served: MultiVariantModel, spec: BaseSpec, name: str, params: dict[str, Any], file: Path) -> Side:
    """Return a variant with random codes in every matrix, written to a file and loaded from it."""
    entries = []
    for tensor, shape in sorted(spec.shapes.items()):
        if len(shape) == 2:
            kept = get_codec(name).normalise(params, shape)
            entries.append(DeltaEntry(tensor, shape, name, kept, partial(random_payload, name, shape, kept)))
    size = write_delta(file, entries, spec).size_bytes
    started = time.process_time()
    with DeltaFile.open(file) as delta:
        variant = loaded_variant(name, delta, served.layout, delta.sha256())
    seconds = time.process_time() - started
    file.unlink()
    return Side(name + "".join(f", {k} {v}" for k, v in params.items()), variant, size, seconds)


def random_payload(name: str, shape: Shape, params: dict[str, Any]) -> Payload:
    """Return a payload of random bytes up to 242, which are valid codes in every codec, and small positive numbers."""
    codec = get_codec(name)
    payload: Payload = {}
    for key, (dtype, size) in codec.payload_spec(shape, params).items():
        whole = not dtype.is_floating_point
        payload[key] = (
            torch.randint(0, 243, size, dtype=dtype) if whole else (1e-3 * torch.rand(size)).to(dtype)
        )
    return payload


def steps_of(served: MultiVariantModel, what: Side | None) -> dict[str, float]:
    """Return the seconds of each kind of step, with the variant in all rows; None for the base alone."""
    variant = None if what is None else what.variant
    caches = [served.new_cache() for _ in range(ROWS)]
    served.step([Chunk(list(range(2, 2 + CONTEXT)), cache, None, False) for cache in caches])
    taken = {}
    for name, rows in STEPS.items():
        counted = dict(served.products)
        chunks = [Chunk([5], cache, variant) for cache in caches[:rows]]
        if rows == PROMPT:
            chunks = [Chunk([2 + at % 200 for at in range(PROMPT)], served.new_cache(), variant)]
        taken[name] = timed(partial(served.step, chunks))
        ran = {k: n - counted.get(k, 0) for k, n in served.products.items()}
        require_form(what, ran, name, served.layout.kernel)
    served.release_variants()
    return taken


def require_form(what: Side | None, ran: dict[tuple[str, str], int], step: str, kernel: str) -> None:
    """Raise ``RuntimeError`` if a step multiplied another form than the variant's, or with another kernel."""
    found = {key for key, count in ran.items() if count}
    held = [getattr(weight, "held", None) for weight in what.variant.weights.values()] if what else []
    wanted = set()
    for one in held:
        if isinstance(one, ResidentSigns | ResidentTiles):
            bulk = kernel == "exact" and step.startswith("prompt")
            wanted.add((one.form, "decoded" if bulk else kernel))
        elif one is not None:
            wanted.add((one.form, "native" if one.form == "factors" else "decoded"))
    # only the prompt's last token goes through the head, and so through the step's own kernel
    allowed = wanted | {(form, kernel) for form, _ in wanted if kernel == "exact" and form == "signs"}
    if not wanted <= found <= allowed:
        raise RuntimeError(f"{step}: {found} were multiplied, not {wanted}")


def timed(function: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    started = time.process_time()
    function()
    return time.process_time() - started


def judged(sides: list[Side], base: dict[str, list[float]]) -> Report:
    """Return the report, compared with the dense peer of the same run."""
    report = Report("resident_forms", peer="decoded once, dense")
    peer = next(found for found in sides if found.dense)
    for name in STEPS:
        report.figure(f"base_{name.replace(' ', '_')}_ms", 1e3 * statistics.median(base[name]))
    for found in sides:
        if found is peer:
            continue
        sizes = (found.variant.resident_bytes / 1e6, peer.variant.resident_bytes / 1e6)
        report.compare(f"{found.label}: resident", *sizes, unit="MB")
        for name in STEPS:
            times = (1e3 * statistics.median(each.seen[name]) for each in (found, peer))
            report.compare(f"{found.label}: step, {name}", *times, unit="ms")
        share = found.variant.resident_bytes / found.file_bytes
        report.aim(f"{found.label}: resident, share of the file", share, 1.1)
    return report


if __name__ == "__main__":
    main()
