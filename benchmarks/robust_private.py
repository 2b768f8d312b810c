"""Robust and private at once: accuracy under the worst attack, by epsilon.

    python benchmarks/robust_private.py [--privacy central|local] [--data digits mnist stories260K] [--rules NAME ...]
        [--attacks NAME ...] [--first-seed N] [--seeds N] [--quick] [--json] [--plot FILE] [--cells FILE]
        [--shared FOLDER]

100 contributors, 20 of them malicious, learn digits or MNIST over 20 rounds, or stories260K over six (``_stories.py``).
Epsilon is for all rounds together, at delta 1e-5, from the package's accountant.

Central privacy protects one contributor's entire update (zero-out adjacency). The rules are those with a known
sensitivity, and the noise is that of the package's own merge (``ClippedMiddle``, ``SignVotes``). The clipping norm is
that of the coordinator's own update on its 100 clean rows before the first round, which does not depend on
contributors. The default rule was chosen on the data set ``clusters`` and on seeds from 20 on; the others are only for
reporting.

Local privacy protects one row of a contributor (DP-SGD, ``_local_noise.py``), so that every rule sees only noised
updates.

Attacks know the rule and the clipping norm, and search their strength without the hub's noise. The peer is the mean at
the same epsilon under the same attack. ``--cells FILE`` stores results, from which a later run resumes.
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
from _defences import ROOT_ALONE, Defence
from _digits import Digits, Losses, Schedule
from _duel import generators, run_rounds
from _local_noise import DPSGD, PrivateDigits
from _report import Report, kept, options, picture, show
from _stories import Stories
from torch import Tensor

from gym_fed.config.hub.privacy import ReleasePrivacy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.privacy.accountant import NoiseEvent, epsilon, noise_multiplier_for
from gym_fed.soup.aggregator import Floats, Integers
from gym_fed.soup.aggregators.mean import Mean
from gym_fed.soup.building import build_aggregator
from gym_fed.soup.private import ClippedMiddle, PrivateMerge, SignVotes

CONTRIBUTORS, MALICIOUS, ROUNDS, LAST = 100, 20, 20, 3
FIRST_SEED = 30
TARGET_DELTA = 1e-5
STORIES = "stories260K"
STORIES_SCHEDULE = Schedule(rounds=6, steps=1, batch=4, lr=2.0)
"""Schedule chosen on seed 20, without attacks."""
LOCAL_SCHEDULE = Schedule(rounds=ROUNDS, steps=1, lr=2.0)
"""One step on all rows per round, chosen on digits, seed 20, without attacks."""
EPSILONS = (2.0, 8.0, 32.0, math.inf)
ATTACKS_USED = ("sign_flip", "inflated_scale", "alie", "inner_product", "min_max", "label_flip")


@dataclass(frozen=True)
class Rule:
    """A private aggregation rule.

    Attributes:
        aggregator: Aggregator of the package.
        kind: ``sum`` adds noise to a sum of clipped updates, ``votes`` to a sum of signs; ``root`` uses only the
            coordinator's own update as the soup.
        gate: True if the clipping norm follows the coordinator's own update, and only updates with a positive cosine to
            it count. Both are independent of other contributors.
    """

    aggregator: str
    kind: str = "sum"
    gate: bool = False


RULES = {
    "mean": Rule("mean"),
    "trimmed_mean": Rule("trimmed_mean"),
    "median": Rule("median"),
    "votes, mean": Rule("mean", "votes"),
    "votes, majority": Rule("majority_vote", "votes"),
    "votes, trimmed": Rule("trimmed_mean", "votes"),
    "root_gate": Rule("mean", gate=True),
    ROOT_ALONE: Rule("mean", "root"),
}
LOCAL_RULES = (
    "mean", "trimmed_mean", "median", "krum", "byzantine_robust", "byzantine_evidence", "fltrust", ROOT_ALONE
)  # fmt: skip


class TrimmedCounts(Mean):
    """The mean vote of each weight without its ``MALICIOUS`` largest and smallest votes, from the noised sum.

    Dropping equal numbers of votes of each sign keeps the sum and lowers the divisor. If fewer than ``MALICIOUS``
    voters disagree, only equal votes are left. This rule is not in the package.
    """

    def of_votes(self, totals: Integers, voters: int, vote: float, *, noised: bool) -> Floats:
        return np.clip(totals / (voters - 2 * MALICIOUS), -1.0, 1.0) * vote


class PrivateDefence(Defence):
    """A defence with a rule and noise."""

    def __init__(self, rule: Rule, clip: float, noise_multiplier: float) -> None:
        super().__init__("mean", 0)
        self.private, self.clip, self.noise_multiplier = rule, clip, noise_multiplier
        self.released = 0
        malicious = 0 if rule.aggregator == "mean" else MALICIOUS
        recipe = SoupRecipe(aggregator=rule.aggregator, num_malicious_nodes=malicious)
        trims_votes = rule.kind == "votes" and rule.aggregator == "trimmed_mean"
        self.aggregator = TrimmedCounts(Mean.Config()) if trims_votes else build_aggregator(recipe)

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
            # Scale the rows, which are already clipped, so that the clipping norm is 2**20 lattice steps.
            factors = {"w": np.full(len(rows), (1 << 20) / clip * (1 - 1e-6))}
            query = ClippedMiddle(merge, factors, len(rows), self.aggregator)
            soup = query.release("w", block, query.begin("w"))
        return torch.from_numpy(soup).float(), None

    def expected(self, updates: Tensor, root: Tensor, losses: Losses | None = None) -> Tensor:
        """Return the soup without noise, which attackers use in their search."""
        if self.private.kind == "root":
            return root
        rows = self._bounded(updates, root)
        if self.private.kind == "votes":
            vote = self.clip / math.sqrt(rows.shape[1])
            totals = rows.sign().sum(0).numpy().astype(np.int64)
            return torch.from_numpy(self.aggregator.of_votes(totals, len(rows), vote, noised=False)).float()
        return self.aggregator.aggregate(rows, torch.ones(len(rows)))

    def _bounded(self, updates: Tensor, root: Tensor) -> Tensor:
        """Clip each update independently of the others."""
        norms, clip = updates.norm(dim=1).clamp_min(1e-12), self._clip(root)
        trust = (updates @ root > 0).float() if self.private.gate else (norms / clip).clamp_max(1.0)
        bounded: Tensor = updates * (clip / norms * trust)[:, None]
        return bounded

    def _clip(self, root: Tensor) -> float:
        return min(self.clip, float(root.norm())) if self.private.gate else self.clip


def main() -> None:
    arguments = parsed()
    torch.set_num_threads(1)
    report = Report("robust_private", peer="mean, same epsilon and attack")
    found = {}
    for data in arguments.data:
        cells = {}
        for rule in arguments.rules:
            for bound in arguments.epsilons:
                for attack in arguments.attacks:
                    # The coordinator's own update does not depend on noise or attack, so it is measured only once.
                    setting = () if rule == ROOT_ALONE else (bound, attack)
                    key = (arguments.privacy, data, rule, *setting, arguments.first_seed, arguments.seeds)
                    make = partial(play, rule, attack, bound, data, arguments)
                    cells[rule, bound, attack] = kept(arguments.cells, key, make)
        _report(report, data, cells, arguments)
        found[data] = cells
    if arguments.plot:
        draw(arguments.plot, found, arguments)
        arguments.plot = None
    report.finish(arguments)


def parsed() -> argparse.Namespace:
    parser = options(__doc__, "cells", "shared", seeds=3)
    parser.add_argument("--privacy", choices=["central", "local"], default="central")
    parser.add_argument(
        "--data", nargs="+", choices=["digits", "mnist", "clusters", STORIES], default=["digits"]
    )
    parser.add_argument("--rules", nargs="+", choices=[*dict.fromkeys([*RULES, *LOCAL_RULES])])
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, metavar="N")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS_USED, default=[*ATTACKS_USED])
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    arguments = parser.parse_args()
    known = [*RULES] if arguments.privacy == "central" else [*LOCAL_RULES]
    arguments.rules = arguments.rules or known
    if foreign := set(arguments.rules) - set(known):
        parser.error(f"--rules {' '.join(sorted(foreign))} are not for --privacy {arguments.privacy}")
    if arguments.privacy == "local" and STORIES in arguments.data:
        parser.error(f"--privacy local has no {STORIES}: its rows are trained in one batch of contributors")
    if arguments.quick:
        arguments.rules, arguments.epsilons, arguments.seeds = ["mean", known[-2]], [8.0], 1
        arguments.attacks = ATTACKS_USED[:2]
    arguments.attacks = ["none", *arguments.attacks]
    return arguments


def play(rule: str, attack: str, bound: float, name: str, arguments: argparse.Namespace) -> list[float]:
    """Return each seed's accuracy (stories260K: negative held-out loss), averaged over the last ``LAST`` rounds."""
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    torch.manual_seed(5)
    if arguments.privacy == "local":
        return play_local(rule, attack, bound, name, seeds)
    if name == STORIES:
        schedule, last = STORIES_SCHEDULE, 1
        data: Any = stories(seeds, arguments.shared)
    else:
        schedule, last = Schedule(rounds=ROUNDS), LAST
        data = Digits(seeds, CONTRIBUTORS, MALICIOUS, "iid", name)
    random = generators()
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


def play_local(rule: str, attack: str, bound: float, name: str, seeds: range) -> list[float]:
    """Like ``play``, for contributors that add noise themselves; malicious ones add it only if there is no attack."""
    steps = LOCAL_SCHEDULE.rounds * LOCAL_SCHEDULE.steps
    private = DPSGD(0.0) if math.isinf(bound) else DPSGD.within(bound, TARGET_DELTA, steps, 1.0)
    noisy = CONTRIBUTORS if attack == "none" else CONTRIBUTORS - MALICIOUS
    data = PrivateDigits(seeds, CONTRIBUTORS, MALICIOUS, name, private, noisy)
    defence = Defence(rule, MALICIOUS)
    return run_rounds(data, defence, attack, LOCAL_SCHEDULE, False, generators(), LAST)[1]


@cache
def stories(seeds: range, shared: Path) -> Stories:
    return Stories(seeds, CONTRIBUTORS, MALICIOUS, shared)


def votes_multiplier(bound: float, rounds: int) -> float:
    """Return the smallest noise multiplier for votes within epsilon ``bound`` over all rounds, to one percent."""
    low, high = 0.01, 1000.0
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        event = NoiseEvent(mechanism="discrete_gaussian", noise_multiplier=middle, count=rounds)
        low, high = (low, middle) if epsilon([event], TARGET_DELTA) <= bound else (middle, high)
    return high


def draw(file: Path, found: dict[str, dict[Any, list[float]]], arguments: argparse.Namespace) -> None:
    """Draw the worst-case score over epsilon, with a panel per data set, a line per rule and shaded seeds."""
    bounds = arguments.epsilons
    places = range(len(bounds))
    with picture(file, 1, len(found), (3.6 * len(found), 3.4)) as panels:
        for (data, cells), panel in zip(found.items(), panels[0], strict=True):
            scale = -1 if data == STORIES else 100
            for rule in arguments.rules:
                worst = [min((cells[rule, b, a] for a in arguments.attacks), key=fmean) for b in bounds]
                low, high = ([scale * end(one) for one in worst] for end in (min, max))
                style = "--" if rule == ROOT_ALONE else "o-"
                heights = [scale * fmean(one) for one in worst]
                (line,) = panel.plot(places, heights, style, ms=3, label=rule)
                panel.fill_between(places, low, high, alpha=0.15, color=line.get_color())
            panel.set_xticks(places, ["no noise" if math.isinf(b) else f"{b:g}" for b in bounds])
            panel.set(xlabel="epsilon", ylabel="held-out loss, nats" if data == STORIES else "% right")
            panel.set_title(data, fontsize=10)
        panels[0, 0].legend(fontsize=7)


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
