"""Rounds of a rule against an attack on the digits: accuracy, backdoor success, and a minority's influence."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from _attacks import TARGET, launched, triggered
from _defences import Defence
from _digits import LABELS, Digits, Perceptron, Schedule, Split
from _scene import Scene
from torch import Tensor

CONTRIBUTORS = 20
LAST = 5
"""Number of last rounds over which the accuracy is averaged, since a single round is noisy."""


@dataclass(frozen=True)
class Outcome:
    """The result of a rule under an attack.

    Attributes:
        accuracies: Accuracy on the test set, for each seed.
        backdoor: Fraction of triggered test images of other labels that are classified as the target, mean over seeds.
    """

    accuracies: tuple[float, ...]
    backdoor: float

    @property
    def accuracy(self) -> float:
        return fmean(self.accuracies)


@dataclass(frozen=True)
class Shares:
    """A minority contributor's share of the soup, mean over rounds and seeds.

    Attributes:
        by_coefficient: Its share of the sum of the coefficients, times n. For a rule without coefficients: how far the
            soup moves along its deviation from the others' mean if that mean is replaced by its update, relative to the
            plain mean.
        by_length: Its share of the sum of coefficient times length, times n; None for a rule without coefficients.
        worst_by_coefficient: ``by_coefficient`` of the contributor with the smallest value.
        worst_by_length: ``by_length`` of the contributor with the smallest value.
        label_accuracy: Accuracy on test images of the last label.
    """

    by_coefficient: float
    by_length: float | None
    worst_by_coefficient: float
    worst_by_length: float | None
    label_accuracy: float


def play(
    rule: str,
    attack: str,
    *,
    malicious: int = 4,
    split: Split = "dirichlet",
    packed: bool = True,
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
    schedule: Schedule | None = None,
    images: str = "digits",
    spread: bool = False,
) -> Outcome:
    """Run ``attack`` against ``rule`` with all seeds at once; ``spread`` selects representative clean images."""
    schedule = schedule or Schedule()
    data = Digits(seeds, CONTRIBUTORS, malicious, split, images, spread)
    defence = Defence(rule, malicious)
    model, accuracies = run_rounds(data, defence, attack, schedule, packed, generators())
    others = data.test_labels != TARGET
    taken = data.network.logits(model, triggered(data.test_images, data)).argmax(-1) == TARGET
    return Outcome(tuple(accuracies), float((taken & others).sum() / others.sum()))


def generators() -> list[torch.Generator]:
    """Return the random generators of honest contributors, malicious clients and the coordinator."""
    return [torch.Generator().manual_seed(seed) for seed in (0, 99, 7)]


def run_rounds(
    data: Digits,
    defence: Defence,
    attack: str,
    schedule: Schedule,
    packed: bool,
    random: list[torch.Generator],
    last: int = LAST,
) -> tuple[Tensor, list[float]]:
    """Return the model after all rounds, and each seed's mean score over the last rounds."""
    honest_random, malicious_random, root_random = random
    model, memory, scores = data.first_model(), dict[str, Any](), list[Tensor]()
    residual = torch.zeros(len(model), data.honest, model.shape[1])
    for number in range(schedule.rounds):
        deltas = data.train(model, schedule, range(data.honest), honest_random)
        root = data.train(model, schedule, data.coordinator, root_random)[:, 0]
        updates, residual = written(deltas, residual, data.network if packed else None)
        losses = data.coordinators_losses(model)
        scene = Scene(
            data, schedule, defence, packed, model, updates, deltas, root, losses, malicious_random, memory
        )
        rounds = torch.cat([updates, launched(attack, scene)], 1)
        model = model + torch.stack(
            [defence.merge(*one)[0] for one in zip(rounds, root, losses, strict=True)]
        )
        if number >= schedule.rounds - last:
            scores.append(data.score(model))
    return model, [float(one) for one in torch.stack(scores).mean(0)]


def minority(
    rule: str,
    *,
    split: Split = "lone",
    packed: bool = True,
    declared: int = 4,
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
    schedule: Schedule | None = None,
    images: str = "digits",
) -> Shares:
    """Measure the first contributor's influence if all are honest but the rule expects malicious clients."""
    schedule = schedule or Schedule()
    data = Digits(seeds, CONTRIBUTORS, 0, split, images)
    defence = Defence(rule, declared)
    generator, root_random = torch.Generator().manual_seed(0), torch.Generator().manual_seed(7)
    model = data.first_model()
    residual = torch.zeros(len(seeds), CONTRIBUTORS, model.shape[1])
    by_coefficient = torch.zeros(len(seeds), CONTRIBUTORS)
    by_length: Tensor | None = torch.zeros(len(seeds), CONTRIBUTORS)
    for _ in range(schedule.rounds):
        deltas = data.train(model, schedule, range(CONTRIBUTORS), generator)
        updates, residual = written(deltas, residual, data.network if packed else None)
        roots = data.train(model, schedule, data.coordinator, root_random)[:, 0]
        losses = data.coordinators_losses(model)
        soups = []
        for index, (round_updates, root) in enumerate(zip(updates, roots, strict=True)):
            soup, coefficients = defence.merge(round_updates, root, losses[index])
            soups.append(soup)
            if coefficients is None or by_length is None:
                by_coefficient[index] += _moved(defence, round_updates, root, soup)
                by_length = None
            else:
                total = float(coefficients.sum())  # a rule may shorten the entire soup
                by_coefficient[index] += CONTRIBUTORS * coefficients / (total or 1.0)
                lengths = coefficients * round_updates.norm(dim=1)
                by_length[index] += CONTRIBUTORS * lengths / lengths.sum()
        model = model + torch.stack(soups)
    by_coefficient /= schedule.rounds
    if by_length is not None:
        by_length /= schedule.rounds
    right, last = data.correct(model), data.test_labels == LABELS - 1
    return Shares(
        float(by_coefficient[:, 0].mean()),
        None if by_length is None else float(by_length[:, 0].mean()),
        float(by_coefficient.amin(1).mean()),
        None if by_length is None else float(by_length.amin(1).mean()),
        float((right & last).sum() / last.sum()),
    )


def written(deltas: Tensor, residual: Tensor, packed: Perceptron | None) -> tuple[Tensor, Tensor]:
    """Return the honest updates as sent, and their error feedback for the next round; floats if ``packed`` is None."""
    if packed is None:
        return deltas, residual
    compensated = deltas + residual
    sent = packed.signs(compensated)
    return sent, compensated - sent


def _moved(defence: Defence, updates: Tensor, root: Tensor, soup: Tensor) -> Tensor:
    """Return the ``[n]`` shares under a coordinate-wise rule."""
    shares, count = torch.zeros(len(updates)), len(updates)
    for index in range(count):
        without = updates.clone()
        without[index] = (updates.sum(0) - updates[index]) / (count - 1)
        own = updates[index] - without[index]
        shares[index] = count * (soup - defence.merge(without, root)[0]) @ own / (own @ own).clamp_min(1e-30)
    return shares
