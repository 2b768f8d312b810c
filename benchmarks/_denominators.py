"""What a coalition's soup is divided by: everybody, or its own members; and which agrees with the value of retraining.

Five contributors teach a small network on scikit-learn's digits over three rounds: two honest ones (one with little
data), two whose labels are wrong in part, and one who sends zeros. Retraining runs the whole federation anew for every
coalition: its Shapley values are what a contributor was worth. There, too, the absent either leave the mean to those
who are there, or leave a gap in it. The games of each round are summed over the rounds of the federation of all five. A
server learning rate above 1 overshoots.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import numpy as np
import torch
from _report import Report
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

from gym_fed.soup.building import build_contribution_method
from gym_fed.soup.contribution import Coalition

PLAYERS, ROUNDS, STEPS, BATCH, LR, HIDDEN = 5, 3, 15, 16, 0.2, 32
AMOUNTS, WRONG, ZERO = (200, 200, 200, 25, 200), (0.0, 0.8, 0.4, 0.0, 0.0), 4
SHAPES = ((64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))
RATES = (1.0, 2.5)
SEEDS = 4
KINDS = ("everybody", "its members")


class _Game:
    def __init__(self, value: Callable[[Coalition], float]) -> None:
        self.n = PLAYERS
        self._value = value

    def value(self, coalition: Coalition) -> float:
        return self._value(coalition)


def measure(report: Report) -> None:
    """Rank agreement of both games with both ways of retraining, and what zeros get."""
    for rate in RATES:
        seasons = [_season(seed, rate) for seed in range(SEEDS)]
        for game in KINDS:
            what = f"digits, server rate {rate:g}, divided by {game}"
            for truth in KINDS:
                agreement = statistics.mean(
                    float(spearmanr(scores[game], true[truth]).statistic) for scores, true in seasons
                )
                report.compare(
                    f"{what}: Spearman with retraining by {truth}", agreement, 1.0, better="higher"
                )
            zeros = max(float(scores[game][ZERO]) for scores, _ in seasons)
            report.compare(f"{what}: largest score of zeros, nats", zeros)


def _season(seed: int, rate: float) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Scores by each game, and by each way of retraining."""
    images, labels = (torch.tensor(one) for one in load_digits(return_X_y=True))
    images = images.float() / 16
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    test, rest = order[:500], order[500:]
    data = []
    for k, (amount, wrong) in enumerate(zip(AMOUNTS, WRONG, strict=True)):
        mine = rest[200 * k : 200 * k + amount]
        given = labels[mine].clone()
        lost = torch.rand(amount, generator=generator) < wrong
        given[lost] = torch.randint(10, (int(lost.sum()),), generator=generator)
        data.append((images[mine], given))
    start = 0.1 * torch.randn(sum(int(np.prod(shape)) for shape in SHAPES), generator=generator)

    def worth(model: Tensor, base: Tensor) -> float:
        return float(_loss(base, images[test], labels[test]) - _loss(model, images[test], labels[test]))

    def update(model: Tensor, k: int, number: int) -> Tensor:
        if k == ZERO:
            return torch.zeros_like(model)
        return _trained(model, *data[k], torch.Generator().manual_seed(1000 * seed + 10 * k + number))

    def count(kind: str, coalition: Coalition) -> int:
        return PLAYERS if kind == "everybody" else max(1, len(coalition))

    def retrained(coalition: Coalition, kind: str) -> float:
        model = start
        for number in range(ROUNDS if coalition else 0):
            steps = torch.stack([update(model, k, number) for k in sorted(coalition)])
            model = model + rate * steps.sum(0) / count(kind, coalition)
        return worth(model, start)

    def shapley(value: Callable[[Coalition], float]) -> np.ndarray:
        return build_contribution_method("shapley", {}).score(_Game(value)).values

    true = {kind: shapley(functools.partial(retrained, kind=kind)) for kind in KINDS}
    scores = {kind: np.zeros(PLAYERS) for kind in KINDS}
    model = start
    for number in range(ROUNDS):
        sent = torch.stack([update(model, k, number) for k in range(PLAYERS)])

        def value(coalition: Coalition, kind: str, model: Tensor = model, sent: Tensor = sent) -> float:
            step = sent[sorted(coalition)].sum(0) / count(kind, coalition)
            return worth(model + rate * step, model)

        for kind in KINDS:
            scores[kind] += shapley(functools.partial(value, kind=kind))
        model = model + rate * sent.mean(0)
    return scores, true


def _loss(model: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    parts, at = [], 0
    for shape in SHAPES:
        size = int(np.prod(shape))
        parts.append(model[at : at + size].reshape(shape))
        at += size
    first, bias, second, last = parts
    return cross_entropy(torch.relu(images @ first + bias) @ second + last, labels)


def _trained(model: Tensor, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    tuned = model.clone()
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        tuned.requires_grad_(True)
        (slope,) = torch.autograd.grad(_loss(tuned, images[chosen], labels[chosen]), tuned)
        tuned = (tuned - LR * slope).detach()
    return tuned - model
