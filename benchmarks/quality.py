"""Share of a fine-tune that each codec keeps, and its size, before and after distillation.

    python benchmarks/quality.py [--quick] [--json] [--plot FILE] [--shared FOLDER] [--case TEXT]
        [--only TEXT]

The fine-tunes are real: stories260K on Shakespeare and on WikiText-2, and gym-nano on a text task that is new to it.
The kept share of the gain in held-out loss is (base - codec) / (base - tuned). Bits per weight of the model are those
of the entire file, including the header. As in BitDelta's paper, the calibration text is generic, and is neither
training nor test text: 300 pages of C4 or, for gym-nano, its pre-training tasks. Each text is split into training,
validation and test parts. Settings were chosen on Shakespeare's validation part, with the training text for
calibration. The reported figures are those of the test parts, on which nothing was chosen. Next to each figure are the
steps of the fine-tune and of the distillation.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _report import Report, options
from _sequences import Sequences, encoded, loss_of, train

from gym_fed.base.models import load_model
from gym_fed.data import generate
from gym_fed.quantization import (
    BitDeltaConfig,
    BitDeltaQuantizer,
    DeltaQuantConfig,
    DeltaQuantizer,
    QuantMethod,
    QuantReport,
)

TASK = "dash"
NANO_TASKS = ("upper", "lower", "first", "length", "copy", "reverse", "sort", "count")
"""Some of the tasks that gym-nano was pre-trained on."""
LENGTH, BATCH = 128, 16
AIM_KEPT, AIM_BITS = 97.0, 1.1
TEST_SEQUENCES = 250


@dataclass(frozen=True)
class Case:
    """A base, its fine-tune with the number of steps, and the calibration text."""

    name: str
    base: Any
    tuned: Any
    tokenizer: Any
    calibration: list[dict[str, Any]]
    steps: int
    test: Sequences
    losses: tuple[float, float]

    def kept(self, model: Any) -> float:
        """Return the kept share of the gain on the test part, in percent."""
        base, tuned = self.losses
        return 100 * (base - loss_of(model, self.test)) / (base - tuned)


@dataclass(frozen=True)
class Variant:
    """A codec, with a function that quantises with a number of distillation steps; 0 means without distillation."""

    name: str
    make: Callable[[int], BitDeltaQuantizer | DeltaQuantizer]
    steps: int = 60


def variants(quick: bool) -> list[Variant]:
    """Return every codec of the registry that can encode a full fine-tune."""

    def bitdelta(**values: Any) -> Callable[[int], BitDeltaQuantizer]:
        return lambda steps: BitDeltaQuantizer(
            BitDeltaConfig(
                **{**values, "distill_bits": steps > 0 and values.get("distill_bits", False)},
                distill_steps=steps,
            )
        )

    def deltaquant(method: QuantMethod, **values: Any) -> Callable[[int], DeltaQuantizer]:
        return lambda steps: DeltaQuantizer(DeltaQuantConfig(method=method, distill_steps=steps, **values))

    half: dict[str, Any] = {"scale_dtype": "bfloat16"}
    small: dict[str, Any] = {**half, "group_size": None, "embeddings": "bitdelta-row", "norms": "int8"}
    bits = {**small, "distill_bits": True, "distill_bits_lr": 0.015}
    found = [
        Variant(
            "bitdelta, tensor scales, embeddings whole", bitdelta(group_size=None, embeddings="dense", **half)
        ),
        Variant("bitdelta, default settings", bitdelta()),
        Variant("bitdelta, tensor scales", bitdelta(**small)),
        Variant("bitdelta, tensor scales, bits trained", bitdelta(calibration_samples=1600, **bits), 400),
        Variant("bitdelta, row scales", bitdelta(**{**small, "group_size": "row"})),
        Variant("bitdelta, groups of 32", bitdelta(**{**small, "group_size": 32})),
        *(Variant(f"{method.value} rows", deltaquant(method, **half), 30) for method in QuantMethod),
        Variant(
            "mixed, 2 bits", deltaquant(QuantMethod.INT8, max_bits_per_weight=2.0, norms="int8", **half), 30
        ),
    ]
    return [Variant(v.name, v.make, 12) for v in found[2:4]] + [found[7]] if quick else found


def main() -> None:
    parser = options(__doc__, "shared")
    parser.add_argument("--case", metavar="TEXT", default="", help="fine-tunes whose names hold it")
    parser.add_argument("--only", metavar="TEXT", default="", help="codecs whose names hold it")
    arguments = parser.parse_args()
    report = Report("quality", peer="as encoded")
    for case in cases(arguments):
        measure(case, report, arguments.quick, arguments.only)
    report.finish(arguments)


def measure(case: Case, report: Report, quick: bool, only: str) -> None:
    points: list[tuple[float, float, str]] = []
    base, tuned = case.losses
    gain = f"held-out loss {base:.3f} -> {tuned:.3f} nats in {case.steps} steps"
    progress(f"{case.name}: {gain}, {len(case.calibration)} rows of calibration text")
    with tempfile.TemporaryDirectory(prefix="gym-quality-") as name:
        out = Path(name) / "variant.gymdelta"
        for variant in (one for one in variants(quick) if only in one.name):
            found = [quantised(case, variant.make(steps), out) for steps in (0, variant.steps)]
            (_, before, _), (made, after, seconds) = found
            report.compare(
                f"{case.name} ({case.steps} steps): {variant.name}, {made.bits_per_weight:.2f} bits, "
                f"{variant.steps} steps",
                after,
                before,
                unit="%",
                better="higher",
            )
            key = f"{case.name} {variant.name}".replace(",", "").replace(" ", "_")
            report.figure(f"{key}_bits", made.bits_per_weight)
            report.figure(f"{key}_seconds", seconds)
            points.append((made.bits_per_weight, after, variant.name))
            progress(
                f"  {variant.name}: {made.bits_per_weight:.3f} bits, {before:.1f} -> {after:.1f}%, {seconds:.0f} s"
            )
    small = [point for point in points if point[0] <= AIM_BITS]
    if small:
        _, after, best = max(small, key=lambda point: point[1])
        progress(f"  best at up to {AIM_BITS} bits: {best}")
        report.aim(f"{case.name}: % kept at up to {AIM_BITS} bits", after, AIM_KEPT, better="higher")
    else:
        report.aim(f"{case.name}: bits of the smallest file", min(points)[0], AIM_BITS)


def quantised(
    case: Case, quantizer: BitDeltaQuantizer | DeltaQuantizer, out: Path
) -> tuple[QuantReport, float, float]:
    """Return the report of the written file, the kept share of the gain in percent, and the seconds."""
    began = time.monotonic()
    made = quantizer.quantize(
        case.base, case.tuned, calibration=case.calibration, tokenizer=case.tokenizer, out=out
    )
    seconds = time.monotonic() - began
    return made, case.kept(quantizer.apply(copy.deepcopy(case.base), out)), seconds


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    quick, data = arguments.quick, arguments.shared / "data"
    stories = arguments.shared / "models" / "stories260K"
    generic = (data / "llamafactory_demo" / "c4_demo.jsonl").read_text(encoding="utf-8").splitlines()
    c4 = [{"text": json.loads(line)["text"][:2000]} for line in generic]
    texts = {
        "shakespeare": data / "tinyshakespeare" / "input.txt",
        "wikitext": data / "wikitext2" / "valid.txt",
    }
    asked = [name for name in texts if arguments.case in name][: 1 if quick else None]
    for name, file in ((one, texts[one]) for one in asked):
        text = file.read_text(encoding="utf-8")
        train, test = text[: len(text) * 8 // 10], text[len(text) * 9 // 10 :]
        rows = [{"text": train[at : at + 2000]} for at in range(0, len(train), 2000)]
        yield fine_tuned(name, str(stories), rows, [{"text": test}], c4, steps=40 if quick else 300, lr=2e-3)
    if not quick and arguments.case in f"gym-nano {TASK}":
        rows = generate(TASK, 1000)
        test = generate(TASK, 500, seed=2, split="heldout")
        general = [
            row for number, task in enumerate(NANO_TASKS) for row in generate(task, 200, seed=10 + number)
        ]
        yield fine_tuned(f"gym-nano {TASK}", "gym-nano", rows, test, general, steps=80, lr=1e-3)


def fine_tuned(
    name: str,
    model: str,
    rows: list[dict[str, Any]],
    test: list[dict[str, Any]],
    calibration: list[dict[str, Any]],
    steps: int,
    lr: float,
) -> Case:
    """Fine-tune all weights with AdamW and a cosine schedule to zero."""
    loaded = load_model(model)
    base, tuned = loaded.model, copy.deepcopy(loaded.model)
    train(tuned, encoded(loaded.tokenizer, rows, LENGTH), steps, lr, BATCH, cycle=True)
    held = encoded(loaded.tokenizer, test, LENGTH, "text" in rows[0])
    held = held[:: -(-len(held) // TEST_SEQUENCES)]
    losses = (loss_of(base, held), loss_of(tuned, held))
    return Case(name, base, tuned, loaded.tokenizer, calibration, steps, held, losses)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
