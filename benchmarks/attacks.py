"""Robust rules against attacks: accuracy under each, in the worst case, and what a minority keeps without attackers.

    python benchmarks/attacks.py [--quick] [--json] [--plot FILE] [--rules NAME ...] [--attacks NAME ...]
        [--images digits mnist clusters] [--first-seed N] [--seeds N] [--rounds N] [--malicious N] [--split NAME]
        [--float] [--spread] [--shares] [--cells FILE] [--federation stories260K [--shared FOLDER]]

20 contributors learn scikit-learn's digits (a perceptron of 4,810 weights), 5,000 images of MNIST (6,634) or generated
clusters over 80 rounds; packed rounds are sign bits with error feedback. The peer is the plain mean under the same
attack. Rules that use clean data get the coordinator's 100 clean images. These are random or, with ``--spread``, those
that a hub selects from a longer file, with each label in proportion. All rules and attacks share one training schedule
(``_digits.Schedule``). Schedule and rules were chosen on the digits' seeds 0 to 4 and 20 to 22, so the default seeds
are 30 to 32 (docs/robustness.md). An attack ``long_NAME`` stretches every malicious update to the maximum length of the
rule; for rules that give all updates the same length it is equal to ``NAME``. The full grid takes hours; ``--cells
FILE`` stores each result as a JSON line, and a later run resumes from the file. ``--shares`` also measures how much
influence a minority keeps without attackers. ``--federation`` attacks real rounds instead: ten contributors, two of
them malicious, train stories260K on Shakespeare speakers with the package's own encoding and merge.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import torch
from _attacks import ATTACKS, LONG, LONG_ATTACKS
from _defences import DEFAULT, RULES, Defence
from _digits import SETS, Schedule, Split
from _duel import CONTRIBUTORS, minority, play
from _report import Report, kept, options, picture, show

AIM_ACCURACY = {("digits", True): 90.0, ("digits", False): 88.0, ("mnist", True): 84.0}
"""Aims for the default's accuracy under the worst attack, in %, by data set and whether updates are packed."""
AIM_SHARE, AIM_LABEL, AIM_BACKDOOR = 0.6, 70.0, 5.0
MALICIOUS, FIRST_SEED = 4, 30
QUICK_RULES, QUICK_ATTACKS = (
    ("mean", DEFAULT),
    ("none", "sign_flip", "inner_product", "backdoor", "camouflage"),
)


@dataclass(frozen=True)
class Cell:
    """One rule against one attack, stored as a line of the ``--cells`` file."""

    rule: str
    attack: str
    seeds: int
    rounds: int
    images: str
    first_seed: int = FIRST_SEED
    malicious: int = MALICIOUS
    split: Split = "dirichlet"
    packed: bool = True
    spread: bool = False
    accuracies: tuple[float, ...] = ()
    backdoor: float = 0.0

    @property
    def percent(self) -> float:
        return 100 * fmean(self.accuracies)


def main() -> None:
    arguments = parsed()
    torch.set_num_threads(1)
    report = Report("attacks", peer="plain mean")
    if arguments.federation:
        from _attacked_stories import measure

        measure(report, arguments.shared, arguments.quick)
    else:
        seeds, rounds = (2, 20) if arguments.quick else (arguments.seeds, arguments.rounds)
        for images in arguments.images:
            choices = (
                arguments.first_seed,
                arguments.malicious,
                arguments.split,
                not arguments.float,
                arguments.spread,
            )
            grid = product(arguments.rules, arguments.attacks)
            cells = [measured(Cell(*one, seeds, rounds, images, *choices), arguments.cells) for one in grid]
            setting = f"{images}, {arguments.split}, {arguments.malicious} of {CONTRIBUTORS} malicious, " + (
                "float" if arguments.float else "packed"
            )
            print_table(report, setting, cells, arguments.attacks)
            if arguments.plot:
                draw(cells, arguments, setting, images)
        if arguments.shares:
            shares(report, arguments)
        arguments.plot = None
    report.finish(arguments)


def parsed() -> argparse.Namespace:
    """Return the options, reduced if ``--quick`` is set."""
    parser = options(__doc__, "cells", "shared", seeds=3)
    parser.add_argument("--rules", nargs="+", metavar="NAME", help=f"{', '.join(RULES)}, or another chain")
    known = [*ATTACKS, *LONG_ATTACKS]
    parser.add_argument("--attacks", nargs="+", choices=known, metavar="NAME", help=", ".join(known))
    parser.add_argument("--images", nargs="+", choices=[*SETS], default=["digits"], help="data sets")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, metavar="N")
    parser.add_argument("--rounds", type=int, default=Schedule().rounds, metavar="N")
    parser.add_argument("--malicious", type=int, default=MALICIOUS, metavar="N", help=f"of {CONTRIBUTORS}")
    parser.add_argument("--split", choices=get_args(Split), default="dirichlet", help="of the data by label")
    parser.add_argument("--float", action="store_true", help="float updates instead of sign bits")
    parser.add_argument("--spread", action="store_true", help="clean images with each label in proportion")
    parser.add_argument("--shares", action="store_true", help="what a minority keeps without attackers, too")
    parser.add_argument("--federation", choices=["stories260K"], help="attack a language model instead")
    arguments = parser.parse_args()
    arguments.rules = arguments.rules or [*(QUICK_RULES if arguments.quick else RULES)]
    arguments.attacks = arguments.attacks or [*(QUICK_ATTACKS if arguments.quick else known)]
    arguments.shares |= arguments.quick
    return arguments


def measured(cell: Cell, file: Path | None) -> Cell:
    """Return the cell with its outcome, from ``file`` if it is stored there."""

    attack = cell.attack
    if attack.startswith(LONG) and Defence(cell.rule, cell.malicious).max_length == 1.0:
        attack = attack.removeprefix(LONG)  # all updates get the same length

    def played() -> list[Any]:
        outcome = play(
            cell.rule,
            attack,
            malicious=cell.malicious,
            split=cell.split,
            packed=cell.packed,
            seeds=tuple(range(cell.first_seed, cell.first_seed + cell.seeds)),
            schedule=Schedule(rounds=cell.rounds),
            images=cell.images,
            spread=cell.spread,
        )
        return [outcome.accuracies, outcome.backdoor]

    accuracies, backdoor = kept(file, asdict(replace(cell, attack=attack)), played)
    found = replace(cell, accuracies=tuple(accuracies), backdoor=backdoor)
    print(f"{cell.rule} against {cell.attack}: {found.percent:.1f}%", file=sys.stderr, flush=True)
    return found


def print_table(report: Report, setting: str, cells: list[Cell], attacks: list[str]) -> None:
    """Print one table per setting, with the worst case in the last column, and add the default's aim."""
    by_rule: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        by_rule.setdefault(cell.rule, {})[cell.attack] = cell
    rows = []
    for rule, found in by_rule.items():
        worst = min(found.values(), key=lambda cell: cell.percent)
        doors = [cell for name, cell in found.items() if "backdoor" in name]
        trigger = ", ".join(f"{100 * cell.backdoor:.0f}" for cell in doors) or "-"
        cells_of = (f"{found[name].percent:.1f}" for name in attacks)
        rows.append([rule, *cells_of, f"{worst.percent:.1f} {worst.attack}", trigger])
        for attack in attacks:
            peer = by_rule["mean"][attack].percent if "mean" in by_rule and rule != "mean" else None
            what = f"{rule} | {attack} | {setting}"
            report.compare(what, found[attack].percent, peer, unit="%", better="higher")
    headers = [header.replace("_", "\n") for header in ("rule", *attacks, "worst", "backdoor")]
    show(f"accuracy in %: {setting}", headers, rows)
    aim = AIM_ACCURACY.get((cells[0].images, cells[0].packed))
    if DEFAULT in by_rule and aim is not None:
        found = by_rule[DEFAULT]
        worst = min(found.values(), key=lambda cell: cell.percent)
        number = len({*attacks} - {"none"})
        label = f"{DEFAULT}: accuracy in % under {worst.attack}, the worst of {number} ({setting})"
        report.aim(label, worst.percent, aim, better="higher")
        for name in (name for name in found if name.endswith("backdoor_unscaled")):
            label = f"{DEFAULT}: images in % that {name} takes ({setting})"
            report.aim(label, 100 * found[name].backdoor, AIM_BACKDOOR)


def shares(report: Report, arguments: argparse.Namespace) -> None:
    """Report the influence of the only holder of a label, and the smallest influence, without attackers."""
    schedule = Schedule(rounds=20 if arguments.quick else 40)
    first, packed = arguments.first_seed, not arguments.float
    seeds = tuple(range(first, first + (2 if arguments.quick else arguments.seeds)))
    rows = []
    for rule in arguments.rules:
        lone = minority(rule, split="lone", packed=packed, seeds=seeds, schedule=schedule)
        usual = minority(rule, split="dirichlet", packed=packed, seeds=seeds, schedule=schedule)
        own, worst = (
            (lone.by_coefficient, lone.by_length),
            (usual.worst_by_coefficient, usual.worst_by_length),
        )
        cells = ["-" if figure is None else f"{figure:.2f}" for figure in (*own, *worst)]
        rows.append([rule, *cells[:2], f"{100 * lone.label_accuracy:.0f}", *cells[2:]])
        if rule == DEFAULT:
            label = f"{rule}: the only holder of a label, without attackers: "
            report.aim(f"{label}share by coefficient", lone.by_coefficient, AIM_SHARE, better="higher")
            report.aim(f"{label}its label, %", 100 * lone.label_accuracy, AIM_LABEL, better="higher")
    headers = (
        "rule",
        "lone holder\nby coefficient",
        "by length",
        "its label, %",
        "worst-off\nby coefficient",
        "by length",
    )
    show("share of the soup without attackers, 1 is fair", headers, rows)


def draw(cells: list[Cell], arguments: argparse.Namespace, setting: str, images: str) -> None:
    """Draw a heat map per data set, with rules as rows, attacks as columns, and the worst case last."""
    percents = {(cell.rule, cell.attack): cell.percent for cell in cells}
    rows = [[percents[rule, attack] for attack in arguments.attacks] for rule in arguments.rules]
    rows = [[*row, min(row)] for row in rows]
    several = len(arguments.images) > 1
    file = arguments.plot.with_stem(f"{arguments.plot.stem}-{images}") if several else arguments.plot
    with picture(file, 1, 1, (3 + 0.6 * len(rows[0]), 1.8 + 0.4 * len(rows))) as panels:
        panel = panels[0, 0]
        panel.imshow(rows, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        panel.set_xticks(range(len(rows[0])), [*arguments.attacks, "worst"], rotation=45, ha="right")
        panel.set_yticks(range(len(rows)), arguments.rules)
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                panel.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=8)
        panel.axvline(len(rows[0]) - 1.5, color="black")
        panel.set_title(f"accuracy in %: {setting}", fontsize=10)


if __name__ == "__main__":
    main()
