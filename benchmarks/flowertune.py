"""FlowerTune's protocol (Gao et al. 2025, arXiv 2506.02961): Flower's FedAvg against the project's updates and rule.

    python benchmarks/flowertune.py [--seeds N ...] [--cells FILE]
                                    [--shared FOLDER] [--quick] [--json] [--plot FILE]

Of twenty clients, 10% are sampled per round and train LoRA on the projections q and v for ten steps. Both sides share
the base, the initial LoRA, the sampled clients and every batch. Flower averages fp32 factors (``ClientApp``,
``FedAvg``, serialised messages). Our side uploads factors at 1.75 bits with error feedback, downloads a quantised soup,
and merges with the default rule and the hub's clean rows. The protocol is reduced for two CPU cores: stories260K on
Shakespeare, fewer rounds, and shorter and smaller batches.

In a second run, two of the twenty clients are malicious and send -8 times their honest update. Settings were chosen on
later speakers and seed 9.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from _flowertune import SAMPLED, Federation, Plan, Setup
from _flowertune_sides import flower, gym
from _report import Report, kept, options

SEEDS = (101, 102, 103)
ROUNDS, QUICK_ROUNDS = 10, 2
RATE = 1e-2
SOUP_RANK = 4
"""Rank of the soup, half of the LoRA's; the server's error feedback carries the rest to the next soup."""
EVALUATIONS = 5
SHARE_OF_BYTES = 1 / 16


def main() -> None:
    parser = options(__doc__, "cells", "shared", seeds=SEEDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("flowertune", peer="Flower 1.41 FedAvg")
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    measure(report, [partial(cell, seed, rounds, arguments) for seed in seeds], rounds)
    report.finish(arguments)


def cell(seed: int, rounds: int, arguments: Any, side: str, attacked: bool) -> dict[str, Any]:
    """Return the result of one run of one side."""
    plan = Plan(seed, rounds, attacked)
    setup = Setup(arguments.shared / "models" / "stories260K", 8, 8, 64, 40, 100, 100)
    every = max(1, rounds // EVALUATIONS)

    def run() -> dict[str, Any]:
        federation = Federation(setup, plan, arguments.shared)
        course = (
            flower(federation, RATE, every) if side == "flower" else gym(federation, RATE, SOUP_RANK, every)
        )
        found = {**asdict(course), "attacks": plan.attacks}
        print(f"seed {seed}, {side}, attacked: {attacked}: {course.losses}", file=sys.stderr, flush=True)
        return found

    found: dict[str, Any] = kept(arguments.cells, [seed, rounds, side, attacked], run)
    found["losses"] = {int(at): loss for at, loss in found["losses"].items()}
    return found


def measure(report: Report, cells: list[Any], rounds: int) -> None:
    """Report rows, figures and aims."""
    found = {
        (side, attacked): [one(side, attacked) for one in cells]
        for attacked in (False, True)
        for side in ("gym", "flower")
    }
    ours, theirs = found["gym", False], found["flower", False]
    for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert own["losses"][0] == other["losses"][0], "the sides start from different models"
        where = f"run {number + 1}"
        report.compare(f"{where}: loss before", own["losses"][0], other["losses"][0], unit="nats")
        for attacked, words in ((False, "loss"), (True, "loss with 2 malicious")):
            own, other = found["gym", attacked][number], found["flower", attacked][number]
            note = f" ({own['attacks']} updates of theirs)" if attacked else ""
            report.compare(
                f"{where}: {words}{note}", own["losses"][rounds], other["losses"][rounds], unit="nats"
            )
        own, other = ours[number], theirs[number]
        budget = 2 * (sum(own["up"]) + sum(own["down"]))
        report.compare(
            f"{where}: loss, Flower's at twice our bytes",
            own["losses"][rounds],
            at_budget(other, budget),
            unit="nats",
        )
        target = own["losses"][0] - 0.5 * (other["losses"][0] - other["losses"][rounds])
        spent = [bytes_to(one, target) for one in (own, other)]
        if None not in spent:
            report.compare(f"{where}: bytes to half of Flower's gain", *spent, unit="B")  # type: ignore[arg-type]
        for way in ("up", "down"):
            sizes = [statistics.mean(one[way]) for one in (own, other)]
            report.compare(f"{where}: bytes {way} per client and round", *sizes, unit="B")
    gaps = [own["losses"][rounds] - other["losses"][rounds] for own, other in zip(ours, theirs, strict=True)]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
    report.figure("gap_nats", statistics.mean(gaps))
    report.figure("gap_error_nats", error)
    report.aim("loss above Flower's, nats, less twice the error", statistics.mean(gaps) - 2 * error, 0.0)
    for way in ("up", "down"):
        share = statistics.mean(
            sum(own[way]) / sum(other[way]) for own, other in zip(ours, theirs, strict=True)
        )
        report.aim(f"bytes {way} against Flower's", share, SHARE_OF_BYTES)
    kept_gains = [
        (own["losses"][0] - own["losses"][rounds]) / (honest["losses"][0] - honest["losses"][rounds])
        for own, honest in zip(found["gym", True], ours, strict=True)
    ]
    report.aim("share of our gain with 2 malicious", min(kept_gains), 0.9, better="higher")


def at_budget(course: dict[str, Any], budget: int) -> float:
    """Return the loss at the last evaluation within a budget of bytes in both directions."""
    reached = [loss for at, loss in course["losses"].items() if spent_by(course, at) <= budget]
    return float(reached[-1])


def bytes_to(course: dict[str, Any], target: float) -> float | None:
    """Return the bytes in both directions until an evaluation is at or below a loss; None if none is."""
    return next((spent_by(course, at) for at, loss in course["losses"].items() if loss <= target), None)


def spent_by(course: dict[str, Any], server_round: int) -> float:
    messages = server_round * SAMPLED
    return float(sum(course["up"][:messages]) + sum(course["down"][:messages]))


if __name__ == "__main__":
    main()
