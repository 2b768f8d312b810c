"""Robust and private at once: accuracy under the worst attack, by epsilon, of rules whose sensitivity is known.

    python benchmarks/robust_private.py [--data digits mnist stories260K] [--attacks NAME ...] [--seeds N] [--quick]
        [--json] [--plot FILE] [--cells FILE] [--shared FOLDER]

100 contributors, 20 of them malicious, learn digits or MNIST over 20 rounds, or stories260K over six (``_stories.py``).
Every rule hides one contributor's whole share (zero-out, delta 1e-5) at the epsilon of its column, for all rounds
together. The noise is that of the package's own merge (``ClippedMiddle``, ``SignVotes``), and epsilon that of its
accountant. The clip is the norm of the coordinator's own update on its 100 clean rows before the first round, which no
contributor has a part in. The peer is the clipped mean at the same epsilon under the same attack.

Attacks know rule and clip, and search their strength without the noise. ``--cells FILE`` resumes.
"""

from __future__ import annotations

import argparse
import math
import secrets
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from _defences import Defence
from _digits import Digits, Losses, Schedule
from _duel import generators, run_rounds
from _report import Report, kept, options, show
from _stories import Stories
from torch import Tensor

from gym_fed.config.hub.privacy import ReleasePrivacy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.privacy.accountant import NoiseEvent, epsilon, noise_multiplier_for
from gym_fed.soup.building import build_aggregator
from gym_fed.soup.private import ClippedMiddle, PrivateMerge, SignVotes

CONTRIBUTORS, MALICIOUS, ROUNDS, LAST = 100, 20, 20, 3
FIRST_SEED = 30
TARGET_DELTA = 1e-5
STORIES = "stories260K"
STORIES_SCHEDULE = Schedule(rounds=6, steps=1, batch=4, lr=2.0)
"""Chosen on seed 20, without attacks."""
EPSILONS = (2.0, 8.0, 32.0, math.inf)
ATTACKS_USED = ("none", "sign_flip", "inflated_scale", "alie", "inner_product", "min_max", "label_flip")


@dataclass(frozen=True)
class Rule:
    """One way to be private.

    Attributes:
        aggregator: Of the package.
        kind: ``sum`` noises a sum of clipped updates, ``votes`` one of signs; ``root`` hears nobody: the coordinator's
            own update is the soup.
        gate: Whether the clip follows the norm of the coordinator's own update, in which no contributor has a part,
            and only updates count whose cosine to it is positive. All stay within the clip, whatever others send.
    """

    aggregator: str
    kind: str = "sum"
    gate: bool = False


RULES = {
    "mean": Rule("mean"),
    "trimmed_mean": Rule("trimmed_mean"),
    "median": Rule("median"),
    "votes, majority": Rule("majority_vote", "votes"),
    "root_gate": Rule("mean", gate=True),
    "root alone": Rule("mean", "root"),
}


class PrivateDefence(Defence):
    """A rule behind noise, as the attacks' opponent."""

    def __init__(self, rule: Rule, clip: float, noise_multiplier: float) -> None:
        super().__init__("mean", 0)
        self.private, self.clip, self.noise_multiplier = rule, clip, noise_multiplier
        self.released = 0
        malicious = 0 if rule.aggregator == "mean" else MALICIOUS
        recipe = SoupRecipe(aggregator=rule.aggregator, num_malicious_nodes=malicious)
        self.aggregator = build_aggregator(recipe)

    def merge(
        self, updates: Tensor, root: Tensor, losses: Losses | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if self.private.kind == "root":
            self.released += 1
            return root, None
        if not self.noise_multiplier:
            return self.expected(updates, root), None
        self.released += 1
        clip = self._clip(root)
        rows = self._bounded(updates, root)
        settings = ReleasePrivacy(
            mechanism="discrete_gaussian" if self.private.kind == "votes" else "gaussian",
            noise_multiplier=self.noise_multiplier,
            clipping_norm=clip,
        )
        merge = PrivateMerge(privacy=settings, seed=secrets.token_bytes(32), tensors=["w"])
        block = rows.numpy()
        if self.private.kind == "votes":
            votes = SignVotes(merge, len(rows), rows.shape[1], self.aggregator)
            noised = votes.exact("w", block) + votes.begin("w")(rows.shape[1])
            soup = votes.value(noised)
        else:
            # The clip's steps of the lattice over the clip; the rows are within it already.
            factors = {"w": np.full(len(rows), (1 << 20) / clip * (1 - 1e-6))}
            query = ClippedMiddle(merge, factors, len(rows), self.aggregator)
            soup = query.release("w", block, query.begin("w"))
        return torch.from_numpy(soup).float(), None

    def expected(self, updates: Tensor, root: Tensor, losses: Losses | None = None) -> Tensor:
        """The soup without noise, which is what an attacker searches by."""
        if self.private.kind == "root":
            return root
        rows = self._bounded(updates, root)
        if self.private.kind == "votes":
            vote = self.clip / math.sqrt(rows.shape[1])
            totals = rows.sign().sum(0).numpy().astype(np.int64)
            return torch.from_numpy(self.aggregator.of_votes(totals, len(rows), vote, noised=False)).float()
        return self.aggregator.aggregate(rows, torch.ones(len(rows)))

    def _bounded(self, updates: Tensor, root: Tensor) -> Tensor:
        """Updates within the clip; each by itself, never by the others."""
        norms, clip = updates.norm(dim=1).clamp_min(1e-12), self._clip(root)
        trust = (updates @ root > 0).float() if self.private.gate else (norms / clip).clamp_max(1.0)
        bounded: Tensor = updates * (clip / norms * trust)[:, None]
        return bounded

    def _clip(self, root: Tensor) -> float:
        return min(self.clip, float(root.norm())) if self.private.gate else self.clip


def main() -> None:
    arguments = parsed()
    torch.set_num_threads(1)
    report = Report("robust_private", peer="clipped mean, same epsilon and attack")
    for data in arguments.data:
        cells = {}
        for rule in arguments.rules:
            for bound in arguments.epsilons:
                for attack in arguments.attacks:
                    key = (data, rule, bound, attack, arguments.seeds)
                    make = partial(play, rule, attack, bound, data, arguments)
                    cells[rule, bound, attack] = kept(arguments.cells, key, make)
        _report(report, data, cells, arguments)
    report.finish(arguments)


def parsed() -> argparse.Namespace:
    parser = options(__doc__, "cells", "shared", seeds=3)
    parser.add_argument("--data", nargs="+", choices=["digits", "mnist", STORIES], default=["digits"])
    parser.add_argument("--rules", nargs="+", choices=[*RULES], default=[*RULES])
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS_USED[1:], default=ATTACKS_USED[1:])
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rules, arguments.epsilons, arguments.seeds = ["mean", "root_gate"], [8.0], 1
        arguments.attacks = ATTACKS_USED[1:3]
    arguments.attacks = ["none", *arguments.attacks]
    return arguments


def play(rule: str, attack: str, bound: float, name: str, arguments: argparse.Namespace) -> list[float]:
    """Accuracy for each seed (of stories260K minus the held-out loss), mean of the last ``LAST`` rounds."""
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    if name == STORIES:
        schedule, last = STORIES_SCHEDULE, 1
        data: Any = stories(seeds, arguments.shared)
    else:
        schedule, last = Schedule(rounds=ROUNDS), LAST
        data = Digits(seeds, CONTRIBUTORS, MALICIOUS, "iid", name)
    random = generators()
    torch.manual_seed(5)
    model = data.first_model()
    multiplier = 0.0
    if not math.isinf(bound):
        if RULES[rule].kind == "votes":
            multiplier = votes_multiplier(bound, schedule.rounds)
        else:
            multiplier = noise_multiplier_for(bound, TARGET_DELTA, count=schedule.rounds)
        mechanism = "discrete_gaussian" if RULES[rule].kind == "votes" else "gaussian"
        spent = epsilon(
            [NoiseEvent(mechanism=mechanism, noise_multiplier=multiplier, count=schedule.rounds)],
            TARGET_DELTA,
        )
        assert 0.9 * bound < spent <= bound, (spent, bound)
    clip = float(data.train(model, schedule, data.coordinator, random[2]).norm(dim=2).mean())
    defence = PrivateDefence(RULES[rule], clip, multiplier)
    _, accuracies = run_rounds(data, defence, attack, schedule, False, random, last)
    assert not multiplier or defence.released == schedule.rounds * arguments.seeds
    return accuracies


@cache
def stories(seeds: range, shared: Path) -> Stories:
    return Stories(seeds, CONTRIBUTORS, MALICIOUS, shared)


def votes_multiplier(bound: float, rounds: int) -> float:
    """The least noise on votes that stays within ``bound`` over all rounds, to one percent."""
    low, high = 0.01, 1000.0
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        event = NoiseEvent(mechanism="discrete_gaussian", noise_multiplier=middle, count=rounds)
        low, high = (low, middle) if epsilon([event], TARGET_DELTA) <= bound else (middle, high)
    return high


def _report(report: Report, data: str, cells: dict[Any, list[float]], arguments: argparse.Namespace) -> None:
    attacks = list(dict.fromkeys(attack for _, _, attack in cells))
    if data == STORIES:
        scale, digits, unit, what = -1, 2, "nats", "held-out loss"
    else:
        scale, digits, unit, what = 100, 1, "%", "% right"
    rows = []
    worst = {}
    for rule in arguments.rules:
        row = [rule]
        for bound in arguments.epsilons:
            means = {attack: fmean(cells[rule, bound, attack]) for attack in attacks}
            name = min(means, key=lambda attack: means[attack])
            worst[rule, bound] = scale * means[name]
            spread = abs(scale) * stdev(cells[rule, bound, name]) if arguments.seeds > 1 else 0.0
            figures = (scale * means["none"], worst[rule, bound], spread)
            row.append("{:.{d}f} / {:.{d}f} ({:.{d}f}) {}".format(*figures, name, d=digits))
        rows.append(row)
    title = f"{data}: {what} without attack / under the worst one (spread over seeds)"
    show(title, ("rule", *(f"epsilon {bound:g}" for bound in arguments.epsilons)), rows)
    for (rule, bound), figure in worst.items():
        report.compare(
            f"{data} epsilon {bound:g} {rule}: worst attack",
            figure,
            worst.get(("mean", bound)),
            unit=unit,
            better="lower" if data == STORIES else "higher",
        )


if __name__ == "__main__":
    main()
