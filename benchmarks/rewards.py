"""Contribution scores against exact Shapley values: agreement, cost, and what free-riders of every kind get.

    python benchmarks/rewards.py [--part methods|sybils|unlinked|neighbours] [--shared FOLDER] [--seeds N]
        [--first SEED] [--quick] [--json] [--plot FILE]

Rounds have eight sign deltas of stories260K (``_rewards_rounds.py``), merged by the mean, in four compositions: eight
honest contributors; the same with a step twice as long; five honest ones with a zero update, a noise update and a
sign-flipped update; and five honest ones with a stale update, a copy with other scales, and an update trained on a
contributor's text with a second key. All 256 coalitions of a round are evaluated once, and the evaluations of each
method are then counted separately. The cost is their share of these 256, where a gradient counts as three. Agreement is
Spearman's rank correlation with the exact values. Methods have their default settings, which were chosen on other
seeds.

``--part sybils`` pays one contributor with one, two and four keys, and three others, in the first three rounds of a
hub, with and without pay as one (the peer has ``together_threshold: null``). Each key sends the contributor's update
with independent noise (0.6 or 1.0 of its norm), a part of it (split by coordinates, scaled to its norm), or an update
trained on the same text with another seed. The table has the sum of the three rounds, and the JSON line also has each
round. Similarity, scores and split are the hub's own; copies (``similarity_threshold``) are rejected in both columns.

``--part unlinked`` does the same for keys that no rule links: each adds its own noise, as long as the update, which is
constant over rounds or changes its sign.

``--part neighbours`` has eight honest contributors with parts of two speakers' texts, four of each, and measures what
contributors with similar data lose through pay as one.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _hub_pay import LUCK, HubPay
from _report import Report, options, picture
from _rewards_rounds import BATCH, CODEC, COMPOSITIONS, CONTRIBUTORS, LENGTH, Season, World
from _sequences import Delta, Sequences, opened, trained
from gym_server.rewards.free_riders import RoundSimilarity
from scipy.stats import spearmanr

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.core.registries import CONTRIBUTIONS
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.evaluation.soup_game import SoupGame, round_coefficients
from gym_fed.soup.building import build_contribution_method
from gym_fed.soup.contribution import CountedGame, Scores, Vector
from gym_fed.soup.screening import compare, leaders, torn_apart

DENSE = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
OTHERS, KEYS, STEPS, ROUNDS = 3, (1, 2, 4), 20, 3
WAYS = ("noise 0.6", "noise 1.0", "pieces", "retrained")
UNLINKED = ("the same noise", "alternating noise")
Together = float | None
Case = tuple[str, str, str, int, Together]
"""A case: way, codec, score, number of keys, threshold."""


@dataclass(frozen=True)
class Trained:
    """One round of training: the model before it, and the deltas of all contributors."""

    model: Any
    own: list[Delta]
    others: list[Delta]


def sybils(report: Report, world: World, arguments: argparse.Namespace, ways: Sequence[str] = WAYS) -> None:
    """Report the credits of all keys of one contributor together in three rounds, mean over seeds."""
    found: dict[Case, list[list[int]]] = {}
    for seed in _seeds(arguments):
        texts = [world.texts[(seed + k) % len(world.texts)] for k in range(1 + OTHERS)]
        rounds = _trained_rounds(world.loaded.model, texts, 2 if arguments.quick else 4, seed)
        for way in ways[:1] if arguments.quick else ways:
            for name, codec in (("dense", DENSE), ("signs", CODEC)):
                if way == "pieces" and codec is CODEC:
                    continue  # sign deltas have no zeros, so they cannot be split
                for keys in KEYS[:2] if arguments.quick else KEYS:
                    sent = [
                        [*_keys(way, one.own, keys, seed, number), *one.others]
                        for number, one in enumerate(rounds)
                    ]
                    for (score, together), paid in _paid(world, rounds, sent, codec).items():
                        earned = [sum(c for name, c in one.items() if int(name) < keys) for one in paid]
                        found.setdefault((way, name, score, keys, together), []).append(earned)
        print(f"seed {seed}", file=sys.stderr, flush=True)
    most, most_of_seeds = 0.0, 0.0
    for (way, name, score, keys, together), credits in found.items():
        if together is not None:
            total, each = (
                statistics.mean(map(sum, found[way, name, score, keys, at])) for at in (together, None)
            )
            what = f"{way}, {name}, by {score}, {keys} keys"
            report.compare(f"{what} (peer: paid each)", total, each, unit="credits")
            for number in range(ROUNDS):
                label = f"{way}_{name}_{score}_{keys}_keys_round_{number + 1}".replace(" ", "_")
                report.figure(label, statistics.mean(one[number] for one in credits))
            if keys > 1:
                of_one = [sum(one) for one in found[way, name, score, 1, together]]
                most = max(most, total / statistics.mean(of_one))
                of_seeds = (sum(many) / one for many, one in zip(credits, of_one, strict=True) if one)
                most_of_seeds = max(most_of_seeds, *of_seeds)
    report.figure(f"{'_'.join(ways[0].split())}_largest_of_a_seed", most_of_seeds)
    if ways is WAYS:
        report.aim("credits of many keys in three rounds, times those of one (largest)", most, 1.02)
    else:
        report.compare("credits of many keys that are not linked, times those of one (largest)", most)


def neighbours(report: Report, world: World, arguments: argparse.Namespace) -> None:
    """Report the pay of honest contributors with parts of the same speakers' texts, with and without pay as one."""
    linked, largest = list[int](), list[float]()
    for seed in _seeds(arguments):
        texts = [world.texts[(2 * seed + k) % len(world.texts)] for k in range(2)]
        parts = [text[k::4] for text in texts for k in range(4)]
        rounds = _trained_rounds(world.loaded.model, parts, 1, seed)
        for codec in (DENSE, CODEC):
            paid = _paid(world, rounds, [[*one.own, *one.others] for one in rounds], codec)
            for score in ("estimate", "participation"):
                default = RewardsConfig().together_threshold
                ours, each = (
                    {who: sum(one.get(who, 0) for one in paid[score, at]) for who in paid[score, at][0]}
                    for at in (default, None)
                )
                lost = {who: 1 - ours[who] / each[who] for who in ours if each[who]}
                linked.append(sum(share > 0.1 for share in lost.values()))
                largest.append(max(lost.values(), default=0.0))
        print(f"seed {seed}: {linked[-4:]} of {len(parts)} lose a tenth", file=sys.stderr, flush=True)
    report.figure("neighbours_that_lose_a_tenth_mean", statistics.mean(linked))
    report.compare("neighbours, of 8, that lose more than a tenth (mean)", statistics.mean(linked))
    report.compare("largest share of its pay that a neighbour loses (mean)", statistics.mean(largest))


def _seeds(arguments: argparse.Namespace) -> range:
    return range(arguments.first, arguments.first + (1 if arguments.quick else arguments.seeds))


def _trained_rounds(model: Any, texts: Sequence[Sequences], count: int, seed: int) -> list[Trained]:
    """Return the updates of ``count`` rounds, in which the model moves by the honest mean."""
    rounds: list[Trained] = []
    for number in range(ROUNDS):
        first = 300 * seed + 100 * number
        own = [trained(model, texts[0], STEPS, LEARNING_RATE, BATCH, first + i) for i in range(count)]
        others = [
            trained(model, text, STEPS, LEARNING_RATE, BATCH, first + 10 + i)
            for i, text in enumerate(texts[1:])
        ]
        rounds.append(Trained(model, own, others))
        model = copy.deepcopy(model)
        with torch.no_grad():
            for name, tensor in model_tensors(model).items():
                tensor.add_(torch.stack([delta[name] for delta in (own[0], *others)]).mean(0))
    return rounds


def _keys(way: str, own: list[Delta], keys: int, seed: int, number: int) -> list[Delta]:
    """Return the updates that the keys of one contributor send in round ``number``."""
    if keys == 1:
        return own[:1]
    if way == "retrained":
        return own[:keys]
    generator = torch.Generator().manual_seed(seed if way in UNLINKED else 10 * seed + number)
    first = own[0]
    if way == "pieces":
        places = {n: torch.randint(keys, t.shape, generator=generator) for n, t in first.items()}
        return [{n: keys**0.5 * t * (places[n] == k) for n, t in first.items()} for k in range(keys)]
    sign = -1.0 if way == "alternating noise" and number % 2 else 1.0
    share = sign if way in UNLINKED else float(way.split()[1])
    return [
        {
            n: t + share * t.square().mean().sqrt() * torch.randn(t.shape, generator=generator)
            for n, t in first.items()
        }
        for _ in range(keys)
    ]


def _paid(
    world: World, rounds: list[Trained], sent: list[list[Delta]], codec: CodecPolicy
) -> dict[tuple[str, Together], list[dict[str, int]]]:
    """Return the credits of each round by contributor, for each score and threshold."""
    default = RewardsConfig().together_threshold
    hubs = {
        (score, at): HubPay(RewardsConfig(score=score, together_threshold=at))
        for score in ("estimate", "participation")
        for at in (None, default)
    }
    paid: dict[tuple[str, Together], list[dict[str, int]]] = {case: [] for case in hubs}
    previous: dict[str, Delta] = {}
    for one, deltas in zip(rounds, sent, strict=True):
        names, scores, gain, similarity = _measured(world, one.model, deltas, previous, codec)
        for case, hub in hubs.items():
            paid[case].append(hub.pay(names, scores, gain, similarity).credits)
        previous |= {name: deltas[int(name)] for name in names}
    return paid


def _measured(
    world: World, model: Any, sent: list[Delta], previous: dict[str, Delta], codec: CodecPolicy
) -> tuple[list[str], Scores, Vector, RoundSimilarity]:
    """Return the names and scores of updates that are not copies, the soup's gain, and the similarities."""
    spec, config = BaseSpec.of(model, "sybils"), RewardsConfig()
    assert config.similarity_threshold is not None
    with opened([*sent, *previous.values()], codec, spec) as files:
        files, earlier = files[: len(sent)], dict(zip(previous, files[len(sent) :], strict=True))
        led = leaders(compare(files, spec).similarity, range(len(files)), config.similarity_threshold)
        kept = [k for k, leader in enumerate(led) if leader == k]
        files, names = [files[k] for k in kept], [f"{k:02d}" for k in kept]
        known = [name for name in names if name in earlier]
        cosine = compare([*files, *(earlier[name] for name in known)], spec).cosine
        n, across = len(names), np.full((len(names), len(names)), np.nan)
        for place, name in enumerate(known):
            across[:, names.index(name)] = cosine[:n, n + place]
        similarity = RoundSimilarity({}, names, cosine[:n, :n], torn_apart(files, spec), across)
        counts = round_coefficients(files, [1.0] * len(files))
        game = SoupGame(model, world.loaded.tokenizer, files, world.held, counts, max_length=LENGTH)
        scores = build_contribution_method("estimate", {}).score(CountedGame(game))
        return names, scores, game.parts(frozenset(range(game.n))), similarity


LEARNING_RATE, HELDOUT = 2e-3, 12
COALITIONS = 1 << CONTRIBUTORS
METHODS = tuple(name for name in CONTRIBUTIONS.own_with("measures") if name != "improvement")
AIM_SPEARMAN, AIM_SHARE = 0.9, 0.1
Found = dict[tuple[str, str], list[Scores]]
"""Scores by composition and method, with one round per seed."""


def main() -> None:
    parser = options(__doc__, "shared", seeds=5)
    parser.add_argument(
        "--first", type=int, default=10, help="first seed of sybils; 0 to 2 chose the thresholds"
    )
    parser.add_argument(
        "--part", choices=("methods", "sybils", "unlinked", "neighbours"), help="default: all"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("rewards", peer="exact Shapley" if arguments.part == "methods" else "paid each")
    if arguments.part in (None, "methods"):
        _methods(report, arguments)
    if arguments.part in (None, "sybils"):
        sybils(report, _world(arguments), arguments)
    if arguments.part in (None, "unlinked"):
        sybils(report, _world(arguments), arguments, UNLINKED)
    if arguments.part in (None, "neighbours"):
        neighbours(report, _world(arguments), arguments)
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
    """Draw agreement over cost, one panel per composition, with bars from the smallest to the largest seed."""
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
    """Report the mean score by kind and method, in nats; scores below zero or within chance earn nothing."""
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
