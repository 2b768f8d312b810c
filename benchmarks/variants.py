"""Personal variants: their size, what writing them keeps of what was trained, and what a new version does to one.

    python benchmarks/variants.py [--quick] [--json] [--plot FILE] [--shared FOLDER] [--part create|rebase]

``create``: variants of gym-nano from 40 chats of a task that it cannot do, and of stories260K from 40 speeches of one
speaker of Shakespeare, by every method of `gym variant create` with its defaults; three people each (three draws of the
chats, three speakers), a fifth of the rows held out. ``rebase``: a variant from 24 chats is carried to new versions
that hold 0.25, 0.5, 1 and 2 times the very same delta. Losses are nats per token on the held-out rows. The peer of each
written variant is the model as it was trained.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _report import Report, options

REPOSITORY = Path(__file__).resolve().parents[1]

from gym_fed.base.models import load_model  # noqa: E402
from gym_fed.core.errors import ErrorCode, GymError  # noqa: E402
from gym_fed.data import generate  # noqa: E402
from gym_fed.delta.file import DeltaFile  # noqa: E402
from gym_fed.personalization import PersonalizedTrainer  # noqa: E402
from gym_fed.personalization.results import CreatedVariant  # noqa: E402

PARTS = ("create", "rebase")
TASK = "dash"
PEOPLE = 3
ROWS, REBASED_ROWS = 40, 24
SHARES = (0.25, 0.5, 1.0, 2.0)
WAYS: dict[str, dict[str, Any]] = {
    "lora, factors in 4 bits": {"method": "lora"},
    "lora, factors in 1.75 bits": {"method": "lora", "encoding": {"factors": "auto", "factor_bits": 1.75}},
    "full, one bit": {"method": "full"},
}


@dataclass(frozen=True)
class Case:
    """A base and the rows of each person."""

    name: str
    base: str
    people: list[list[dict[str, Any]]]


def main() -> None:
    """Measure what was asked for."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=REPOSITORY.parent / "shared", help="models and data")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = arguments.part or PARTS
    people = 1 if arguments.quick else PEOPLE
    report = Report("variants", peer="as trained")
    with tempfile.TemporaryDirectory(prefix="gym-variants-") as name:
        if "create" in parts:
            for case in cases(arguments.shared, people):
                create(report, case, Path(name))
        if "rebase" in parts:
            rebase(report, Path(name))
    report.finish(arguments)


def cases(shared: Path, people: int) -> Iterator[Case]:
    """gym-nano, and stories260K where it is at hand."""
    yield Case("gym-nano", "gym-nano", [generate(TASK, ROWS, seed=person) for person in range(people)])
    speakers = shared / "data/shakespeare_by_speaker/speakers.jsonl"
    if not speakers.is_file():
        print(f"stories260K is left out: no {speakers}; give --shared", file=sys.stderr)
        return
    found = [json.loads(line) for line in speakers.read_text(encoding="utf-8").splitlines()]
    spoken = [[{"text": text} for text in speaker["speeches"][:ROWS]] for speaker in found]
    chosen = [rows for rows in spoken if len(rows) == ROWS][:people]
    yield Case("stories260K", str(shared / "models/stories260K"), chosen)


def create(report: Report, case: Case, folder: Path) -> None:
    """Every way of making a variant, for every person."""
    for number, (way, settings) in enumerate(WAYS.items()):
        made: list[CreatedVariant] = []
        for person, rows in enumerate(case.people):
            trainer = PersonalizedTrainer(case.base, variants=folder / f"{case.name}-{number}", **settings)
            made.append(trainer.create_variant(f"user-{person}", examples=rows))
        name = f"{case.name}, {way}"
        report.compare(
            f"{name}: loss",
            statistics.mean(one.loss_encoded for one in made),
            statistics.mean(one.loss_trained for one in made),
            unit="nats",
        )
        kept = [100 * one.kept for one in made if one.kept is not None]
        report.compare(f"{name}: gain kept", statistics.mean(kept), unit="%", better="higher")
        report.compare(f"{name}: size", statistics.mean(one.size_bytes for one in made) / 1e3, unit="kB")
        smaller = statistics.mean(one.times_smaller for one in made)
        report.compare(f"{name}: smaller than bf16", smaller, unit="times", better="higher")
        for index, one in enumerate(made):
            report.figure(f"{name}, person {index}: loss before", one.loss_before)
            report.figure(f"{name}, person {index}: loss trained", one.loss_trained)
            report.figure(f"{name}, person {index}: loss written", one.loss_encoded)


def rebase(report: Report, folder: Path) -> None:
    """One variant, carried to versions that hold more and more of it."""
    rows = generate(TASK, REBASED_ROWS, seed=0)
    trainer = PersonalizedTrainer("gym-nano", variants=folder / "rebased")
    made = trainer.create_variant("ada", examples=rows)
    report.compare("rebase: the old version alone", made.loss_before, unit="nats")
    report.compare("rebase: with the variant", made.loss_encoded, unit="nats")
    for share in SHARES:
        version = folder / f"version-{share}"
        loaded = load_model("gym-nano")
        with DeltaFile.open(made.path) as delta, torch.no_grad():
            for name, weight in loaded.model.named_parameters():
                if name in delta:
                    weight += share * delta.decode(name)
        loaded.model.save_pretrained(version)
        loaded.tokenizer.save_pretrained(version)
        try:
            losses = trainer.rebase_variant(
                "ada", str(version), examples=rows, output_name=f"ada-{share}"
            ).losses
        except GymError as error:
            if error.code is not ErrorCode.UPDATE_REFUSED:
                raise
            print(f"rebase, share {share}: refused: {error.message}")
            losses = trainer.rebase_variant(
                "ada", str(version), examples=rows, output_name=f"ada-{share}", force=True
            ).losses
        for what, loss in asdict(losses).items():
            if isinstance(loss, float):
                report.compare(f"rebase, share {share}: {what.replace('_', ' ')}", loss, unit="nats")


if __name__ == "__main__":
    main()
