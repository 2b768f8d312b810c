"""Contribution scores against exact Shapley values: agreement, cost, and what free-riders of every kind get.

    python benchmarks/rewards.py [--part methods|sybils] [--shared FOLDER] [--seeds N] [--first SEED]
        [--quick] [--json] [--plot FILE]

Rounds of eight updates to stories260K as sign deltas (``_rewards_rounds.py``), merged by the mean, in four
compositions: eight honest contributors, also with a step twice as long; five with an update of zeros, one of noise and
an honest one with its signs flipped; five with a stale update, a copy under other scales, and one trained again on a
contributor's own text under a second key. All 256 coalitions are evaluated once for every round; each method is then
counted as if it were alone. The share is of these 256, a gradient counting for three. Agreement is Spearman's rank
correlation with the exact values. The settings of methods are their defaults, and were chosen on other seeds than
these.

``--part sybils`` pays one contributor with one, two and four keys next to three others, with and without pay as one
(the peer is paid with ``together_threshold: null``). Each key sends the contributor's update with independent noise
(0.6 or 1.0 of its norm), a piece of it (cut by coordinates, scaled to its norm), or an update trained on the same text
with another seed. The round that is paid is the second of a hub: everybody sent an update of the same kind in the
first. Similarity, scores and split are the hub's own; copies (``similarity_threshold``) are rejected in both columns.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _report import Report, options, picture
from _rewards_rounds import BATCH, CODEC, COMPOSITIONS, CONTRIBUTORS, LENGTH, Season, World
from _sequences import Delta, Sequences, opened, trained
from gym_server.rewards.free_riders import RoundSimilarity
from gym_server.rewards.split import MeasuredRound, split
from scipy.stats import spearmanr

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.core.registries import CONTRIBUTIONS
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.evaluation.soup_game import SoupGame, round_coefficients
from gym_fed.soup.building import build_contribution_method
from gym_fed.soup.contribution import CountedGame, Scores
from gym_fed.soup.credit import RunningScore
from gym_fed.soup.screening import compare, leaders, torn_apart

DENSE = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
OTHERS, KEYS, STEPS = 3, (1, 2, 4), 20
WAYS = ("noise 0.6", "noise 1.0", "pieces", "retrained")
Together = float | None


def sybils(report: Report, world: World, arguments: argparse.Namespace) -> None:
    """Credits of 1000 that all keys of one contributor have together, mean of seeds."""
    default = RewardsConfig().together_threshold
    found: dict[tuple[str, str, str, int, Together], list[int]] = {}
    for seed in range(arguments.first, arguments.first + (1 if arguments.quick else arguments.seeds)):
        texts = [world.texts[(seed + k) % len(world.texts)] for k in range(1 + OTHERS)]
        count = 2 if arguments.quick else 4
        before, model = _trained_round(world.loaded.model, texts, count, 200 * seed)
        now, _ = _trained_round(model, texts, count, 200 * seed + 100)
        for way in WAYS[:1] if arguments.quick else WAYS:
            for name, codec in (("dense", DENSE), ("signs", CODEC)):
                if way == "pieces" and codec is CODEC:
                    continue  # signs have no zeros to leave out
                for keys in KEYS[:2] if arguments.quick else KEYS:
                    earlier = [*_keys(way, before[0], keys, 2 * seed), *before[1]]
                    sent = [*_keys(way, now[0], keys, 2 * seed + 1), *now[1]]
                    for score, together, earned in _paid(world, model, earlier, sent, codec, keys, default):
                        found.setdefault((way, name, score, keys, together), []).append(earned)
    most = 0.0
    for (way, name, score, keys, together), credits in found.items():
        if together is not None:
            each = statistics.mean(found[way, name, score, keys, None])
            what = f"{way}, {name}, by {score}, {keys} keys (peer: paid each)"
            report.compare(what, statistics.mean(credits), each, unit="credits")
            if keys > 1:
                single = statistics.mean(found[way, name, score, 1, together])
                most = max(most, statistics.mean(credits) / single)
    report.aim("credits of many keys, times those of one (largest)", most, 1.02)


def _trained_round(
    model: Any, texts: Sequence[Sequences], count: int, seed: int
) -> tuple[tuple[list[Delta], list[Delta]], Any]:
    """The contributor's ``count`` updates and the others', and the model with the mean of the honest ones."""
    own = [trained(model, texts[0], STEPS, LEARNING_RATE, BATCH, seed + i) for i in range(count)]
    others = [
        trained(model, text, STEPS, LEARNING_RATE, BATCH, seed + 10 + i) for i, text in enumerate(texts[1:])
    ]
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in model_tensors(moved).items():
            tensor.add_(torch.stack([delta[name] for delta in (own[0], *others)]).mean(0))
    return (own, others), moved


def _keys(way: str, own: list[Delta], keys: int, seed: int) -> list[Delta]:
    if keys == 1:
        return own[:1]
    if way == "retrained":
        return own[:keys]
    generator = torch.Generator().manual_seed(seed)
    first = own[0]
    if way == "pieces":
        places = {n: torch.randint(keys, t.shape, generator=generator) for n, t in first.items()}
        return [{n: keys**0.5 * t * (places[n] == k) for n, t in first.items()} for k in range(keys)]
    share = float(way.split()[1])
    return [
        {
            n: t + share * t.square().mean().sqrt() * torch.randn(t.shape, generator=generator)
            for n, t in first.items()
        }
        for _ in range(keys)
    ]


def _paid(
    world: World,
    model: Any,
    earlier: list[Delta],
    sent: list[Delta],
    codec: CodecPolicy,
    keys: int,
    default: Together,
) -> list[tuple[str, Together, int]]:
    """By score and threshold, what the first ``keys`` of the updates earn."""
    spec = BaseSpec.of(model, "sybils")
    with opened([*sent, *earlier], codec, spec) as files:
        files, before = files[: len(sent)], files[len(sent) :]
        config = RewardsConfig()
        assert config.similarity_threshold is not None
        led = leaders(compare(files, spec).similarity, range(len(files)), config.similarity_threshold)
        kept = [k for k, leader in enumerate(led) if leader == k]
        files, names = [files[k] for k in kept], [f"{k:02d}" for k in kept]
        before, n = [before[k] for k in kept], len(kept)
        cosine = compare([*files, *before], spec).cosine
        torn = torn_apart(files, spec)
        similarity = RoundSimilarity({}, names, cosine[:n, :n], torn, cosine[:n, n:])
        counts = round_coefficients(files, [1.0] * len(files))
        game = SoupGame(model, world.loaded.tokenizer, files, world.held, counts, max_length=LENGTH)
        scores = build_contribution_method("estimate", {}).score(CountedGame(game))
        gain = game.parts(frozenset(range(game.n)))
    chance = np.zeros(len(names)) if scores.chance is None else scores.chance
    chances = dict(zip(names, chance.tolist(), strict=True))
    measured = MeasuredRound(
        dict(zip(names, scores.parts, strict=True)),
        {name: LUCK * value for name, value in chances.items()},
        chances,
        gain,
        scores.block_weights,
        {},
        RunningScore(0.0 * gain),
    )
    paid: list[tuple[str, Together, int]] = []
    for score in ("estimate", "participation"):
        for together in (None, default):

            def paid_as_one(
                who: Collection[str], at: Together = together, by_score: bool = score == "estimate"
            ) -> list[list[str]]:
                return [] if at is None else similarity.together(who, at, by_score)

            found = split(
                RewardsConfig(score=score),
                dict.fromkeys(names, 0.0),
                measured if score == "estimate" else None,
                paid_as_one,
            )
            paid.append((score, together, sum(c for name, c in found.credits.items() if int(name) < keys)))
    return paid


LEARNING_RATE, HELDOUT = 2e-3, 12
COALITIONS = 1 << CONTRIBUTORS
METHODS = tuple(name for name in CONTRIBUTIONS.own_with("measures") if name != "improvement")
AIM_SPEARMAN, AIM_SHARE = 0.9, 0.1
LUCK = 2.0
"""Standard deviations of blind luck that count as a score of nothing, as in the hub's rewards."""

Found = dict[tuple[str, str], list[Scores]]
"""By composition and method, a round a seed."""


def main() -> None:
    parser = options(__doc__, "shared", seeds=5)
    parser.add_argument(
        "--first", type=int, default=10, help="first seed of sybils; 0 to 2 chose the thresholds"
    )
    parser.add_argument("--part", choices=("methods", "sybils"), help="default: all")
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
