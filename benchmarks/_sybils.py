"""What one contributor earns under one, two and four keys in a round with three others, with and without pay as one.

Every key sends the contributor's update with independent noise on it (of 0.6 or 1.0 of its norm), a piece of it (cut by
coordinates, scaled to its norm), or trains anew on the same text from another seed. Similarity, scores and split are
the hub's own; its copies (``similarity_threshold``) are rejected in both columns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from _report import Report
from _rewards_rounds import CODEC, LENGTH, Delta, World, _trained
from gym_server.rewards.free_riders import RoundSimilarity
from gym_server.rewards.split import MeasuredRound, split

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_source
from gym_fed.delta.file import DeltaFile
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
        model = world.loaded.model
        own = [
            _trained(model, texts[0], LEARNING_RATE, STEPS, 100 * seed + i)
            for i in range(2 if arguments.quick else 4)
        ]
        others = [
            _trained(model, text, LEARNING_RATE, STEPS, 100 * seed + 10 + i)
            for i, text in enumerate(texts[1:])
        ]
        for way in WAYS[:1] if arguments.quick else WAYS:
            for name, codec in (("dense", DENSE), ("signs", CODEC)):
                if way == "pieces" and codec is CODEC:
                    continue  # signs have no zeros to leave out
                for keys in KEYS[:2] if arguments.quick else KEYS:
                    sent = [*_keys(way, own, keys, seed), *others]
                    for score, together, earned in _paid(world, sent, codec, keys, default):
                        found.setdefault((way, name, score, keys, together), []).append(earned)
    for (way, name, score, keys, together), credits in found.items():
        if together is not None:
            before = statistics.mean(found[way, name, score, keys, None])
            what = f"{way}, {name}, by {score}, {keys} keys (peer: paid each)"
            report.compare(what, statistics.mean(credits), before, unit="credits")


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
    world: World, sent: list[Delta], codec: CodecPolicy, keys: int, default: Together
) -> list[tuple[str, Together, int]]:
    """By score and threshold, what the first ``keys`` of the updates earn."""
    spec = BaseSpec.of(world.loaded.model, "sybils")
    with tempfile.TemporaryDirectory(prefix="gym-sybils-") as folder, ExitStack() as stack:
        files = []
        for k, delta in enumerate(sent):
            path = Path(folder) / f"{k}.gymdelta"
            encode_source(delta.__getitem__, codec, path, spec)
            files.append(stack.enter_context(DeltaFile.open(path, spec)))
        config = RewardsConfig()
        assert config.similarity_threshold is not None
        led = leaders(compare(files, spec).similarity, range(len(files)), config.similarity_threshold)
        kept = [k for k, leader in enumerate(led) if leader == k]
        files, names = [files[k] for k in kept], [f"{k:02d}" for k in kept]
        similarity = RoundSimilarity({}, names, compare(files, spec).cosine, torn_apart(files, spec))
        counts = round_coefficients(files, [1.0] * len(files))
        game = SoupGame(
            world.loaded.model, world.loaded.tokenizer, files, world.held, counts, max_length=LENGTH
        )
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
