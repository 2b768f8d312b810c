"""Credits of one contributor with one, two and four keys next to three others, with and without pay as one.

Each key sends the contributor's update with independent noise (0.6 or 1.0 of its norm), a piece of it (cut by
coordinates, scaled to its norm), or an update trained on the same text with another seed. The round that is paid is the
second of a hub: everybody sent an update of the same kind in the first. Similarity, scores and split are the hub's own;
copies (``similarity_threshold``) are rejected in both columns.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from _report import Report
from _rewards_rounds import BATCH, CODEC, LENGTH, World
from _sequences import Delta, Sequences, opened, trained
from gym_server.rewards.free_riders import RoundSimilarity
from gym_server.rewards.split import MeasuredRound, split

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.evaluation.soup_game import SoupGame, round_coefficients
from gym_fed.soup.building import build_contribution_method
from gym_fed.soup.contribution import CountedGame
from gym_fed.soup.credit import RunningScore
from gym_fed.soup.screening import compare, leaders, torn_apart

DENSE = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
OTHERS, KEYS, STEPS, LEARNING_RATE, LUCK = 3, (1, 2, 4), 20, 2e-3, 2.0
WAYS = ("noise 0.6", "noise 1.0", "pieces", "trained anew")
Together = float | None


def sybils(report: Report, world: World, arguments: argparse.Namespace) -> None:
    """Credits of 1000 that all keys of one contributor have together, mean of seeds."""
    default = RewardsConfig().together_threshold
    found: dict[tuple[str, str, str, int, Together], list[int]] = {}
    for seed in range(1 if arguments.quick else arguments.seeds):
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
    if way == "trained anew":
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
