"""Contribution scores against exact Shapley values: agreement, cost, and what free-riders of every kind get.

    python benchmarks/rewards.py [--part methods|sybils] [--shared FOLDER] [--seeds N] [--quick] [--json]
        [--plot FILE]

Rounds of eight updates to stories260K as sign deltas (``_rewards_rounds.py``), merged by the mean, in four
compositions: eight honest contributors, also with a step twice as long; five with an update of zeros, one of noise and
an honest one with its signs flipped; five with a stale update, a copy under other scales, and one trained again on a
contributor's own text under a second key. All 256 coalitions are evaluated once for every round; each method is then
counted as if it were alone. The share is of these 256, a gradient counting for three. Agreement is Spearman's rank
correlation with the exact values. The settings of methods are their defaults, and were chosen on other seeds than
these. ``--part sybils`` pays one contributor under many keys (``_sybils.py``; "peer" is with ``together_threshold:
null``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from _report import SHARED, Report, options, picture
from _rewards_rounds import COMPOSITIONS, CONTRIBUTORS, Season, World
from _sybils import sybils
from scipy.stats import spearmanr

from gym_fed.core.registries import CONTRIBUTIONS
from gym_fed.evaluation.soup_game import SoupGame
from gym_fed.soup.building import build_contribution_method
from gym_fed.soup.contribution import CountedGame, Scores

LEARNING_RATE, HELDOUT = 2e-3, 12
COALITIONS = 1 << CONTRIBUTORS
METHODS = tuple(name for name in CONTRIBUTIONS.own_with("measures") if name != "improvement")
AIM_SPEARMAN, AIM_SHARE = 0.9, 0.1
LUCK = 2.0
"""Standard deviations of blind luck that count as a score of nothing, as in the hub's rewards."""

Found = dict[tuple[str, str], list[Scores]]
"""By composition and method, a round a seed."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--shared", type=Path, default=SHARED, help="stories260K and its data")
    parser.add_argument("--seeds", type=int, default=5, help="rounds of each composition")
    parser.add_argument(
        "--part", choices=("methods", "sybils"), help="one of the comparisons; all by default"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("rewards", peer="paid each" if arguments.part == "sybils" else "exact Shapley")
    if arguments.part in (None, "methods"):
        _methods(report, arguments)
    if arguments.part in (None, "sybils"):
        sybils(report, _world(arguments), arguments)
    arguments.plot = None
    report.finish(arguments)


def _methods(report: Report, arguments: argparse.Namespace) -> None:
    seeds = 1 if arguments.quick else arguments.seeds
    world = _world(arguments)
    found: Found = {}
    seconds: dict[str, list[float]] = {"evaluation": [], "estimate": []}
    for seed in range(seeds):
        season = Season.of(world, seed, LEARNING_RATE)
        for composition in ("mixed",) if arguments.quick else COMPOSITIONS:
            with season.round(composition) as game:
                _score(game, composition, found, seconds)
            agreement = ", ".join(f"{n} {_agreements(found, composition, n)[-1]:.3f}" for n in METHODS)
            print(f"seed {seed}, {composition}: {agreement}", file=sys.stderr, flush=True)
    _agreement(report, found)
    _free_riders(report, found)
    one = statistics.median(seconds["evaluation"])
    report.compare(
        "seconds a round: estimate", statistics.median(seconds["estimate"]), COALITIONS * one, unit="s"
    )
    if arguments.plot:
        _draw(found, arguments.plot)


def _draw(found: Found, file: Path) -> None:
    """Agreement over cost, a panel a composition; bars from the least to the largest seed."""
    compositions = list(dict.fromkeys(composition for composition, _ in found))
    with picture(file, 1, len(compositions), (4 * len(compositions), 3.6)) as panels:
        for composition, panel in zip(compositions, panels[0], strict=True):
            for name in METHODS:
                values, cost = _agreements(found, composition, name), 100 * _share(found[composition, name])
                mean = statistics.mean(values)
                bars = [[mean - min(values)], [max(values) - mean]]
                panel.errorbar(cost, mean, yerr=bars, fmt="o", capsize=3, label=name)
            panel.axvline(100 * AIM_SHARE, color="grey", linewidth=0.7)
            panel.axhline(AIM_SPEARMAN, color="grey", linewidth=0.7)
            panel.set(xscale="log", title=composition, xlabel="evaluations, % of all coalitions")
        panels[0][0].set_ylabel("Spearman with exact Shapley")
        panels[0][-1].legend(fontsize=8)


def _world(arguments: argparse.Namespace) -> World:
    return World(arguments.shared if arguments.shared.is_dir() else None, 6 if arguments.quick else HELDOUT)


def _score(game: SoupGame, composition: str, found: Found, seconds: dict[str, list[float]]) -> None:
    game.base_loss()
    table = CountedGame(game)
    began = time.perf_counter()
    exact = build_contribution_method("shapley", {}).score(table)
    seconds["evaluation"].append((time.perf_counter() - began) / COALITIONS)
    for name in METHODS:
        began = time.perf_counter()
        if name == "estimate":
            scores = build_contribution_method(name, {}).score(game)
            seconds["estimate"].append(time.perf_counter() - began)
        else:
            scores = exact if name == "shapley" else build_contribution_method(name, {}).score(table)
        found.setdefault((composition, name), []).append(scores)


def _agreement(report: Report, found: Found) -> None:
    for (composition, name), rounds in found.items():
        if name == "shapley":
            continue
        agreement, share = _agreements(found, composition, name), _share(rounds)
        report.compare(
            f"{composition}: {name}, Spearman (mean)", statistics.mean(agreement), 1.0, better="higher"
        )
        report.figure(f"{composition}_{name}_spearman_least", min(agreement))
        report.compare(f"{composition}: {name}, evaluations", share * COALITIONS, float(COALITIONS))
        if name == "estimate":
            report.aim(
                f"{composition}: estimate agrees with exact Shapley",
                statistics.mean(agreement),
                AIM_SPEARMAN,
                better="higher",
            )
            report.aim(f"{composition}: its share of the evaluations", share, AIM_SHARE)


def _free_riders(report: Report, found: Found) -> None:
    """Mean score by kind and method, in nats; what lies within luck, or is below zero, earns nothing."""
    for (composition, name), rounds in found.items():
        who = COMPOSITIONS[composition]
        for kind in dict.fromkeys(who):
            places = [k for k, one in enumerate(who) if one == kind]
            values = [float(scores.values[k]) for scores in rounds for k in places]
            report.compare(
                f"{composition}: {kind} by {name}, mean nats", statistics.mean(values), better="higher"
            )
            if kind in ("zero", "noise", "sign_flip"):
                above = [
                    float(s.values[k] - LUCK * s.chance[k])
                    for s in rounds
                    for k in places
                    if s.chance is not None
                ]
                what = f"{kind} by {name}: largest score" + (" beyond luck" if kind == "noise" else "")
                report.aim(what, max(above if kind == "noise" else values), 0.0)


def _agreements(found: Found, composition: str, name: str) -> list[float]:
    pairs = zip(found[composition, name], found[composition, "shapley"], strict=True)
    return [float(spearmanr(one.values, exact.values).statistic) for one, exact in pairs]


def _share(rounds: list[Scores]) -> float:
    return statistics.mean(scores.evaluations for scores in rounds) / COALITIONS


if __name__ == "__main__":
    main()
