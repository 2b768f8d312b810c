"""Personal variants: their size, and what writing them keeps of what was trained.

    python benchmarks/variants.py [--quick] [--json] [--plot FILE] [--shared FOLDER]

Variants of gym-nano from 40 chats of a task that it cannot do, and of stories260K from 40 speeches of one speaker of
Shakespeare, by every method of `gym variant create` with its defaults. Three people each (three draws of the chats,
three speakers), a fifth of the rows held out. Losses are nats per token on the held-out rows. The peer of each written
variant is the model as it was trained.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _report import SHARED, Report, options
from _sequences import speeches

from gym_fed.data import generate
from gym_fed.personalization import PersonalizedTrainer
from gym_fed.personalization.results import CreatedVariant

TASK = "dash"
PEOPLE = 3
ROWS = 40
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
    parser = options(__doc__)
    parser.add_argument("--shared", type=Path, default=SHARED, help="models and data")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    people = 1 if arguments.quick else PEOPLE
    report = Report("variants", peer="as trained")
    with tempfile.TemporaryDirectory(prefix="gym-variants-") as name:
        for case in cases(arguments.shared, people):
            create(report, case, Path(name))
    report.finish(arguments)


def cases(shared: Path, people: int) -> Iterator[Case]:
    """gym-nano, and stories260K where it is at hand."""
    yield Case("gym-nano", "gym-nano", [generate(TASK, ROWS, seed=person) for person in range(people)])
    speakers = shared / "data/shakespeare_by_speaker/speakers.jsonl"
    if not speakers.is_file():
        print(f"stories260K is left out: no {speakers}; give --shared", file=sys.stderr)
        return
    spoken = [rows[:ROWS] for rows in speeches(shared)]
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


if __name__ == "__main__":
    main()
