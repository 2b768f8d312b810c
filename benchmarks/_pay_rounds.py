"""Fifty rounds on images with contributors who differ: how much they have, how long they train, and when they come.

Ten members are there from the first round; two of them miss every second round, one has 60% wrong labels. Two more
come after a third and after two thirds of the rounds. Two senders of noise send a random direction as long as the
median update. Of the images, ``heldout`` judge, a quarter trains, and all others give the true marginal values.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np
import torch
from _images import image_set
from gym_server.rewards.free_riders import RoundSimilarity
from torch import Tensor

from gym_fed.evaluation.loss import RowLosses, num_blocks
from gym_fed.soup.contribution import Coalition, Vector

MEMBERS = tuple(f"member {i}" for i in range(10))
LATE = ("late 1", "late 2")
NOISE = ("noise 1", "noise 2")
EVERYBODY = (*MEMBERS, *LATE, *NOISE)
BATCH, LEARNING_RATE = 16, 0.05
WRONG_LABELS = 0.6


class RoundGame:
    """One round's updates to a perceptron as players; see ``gym_fed.soup.contribution``."""

    def __init__(self, world: World, model: Tensor, updates: Tensor) -> None:
        self._world, self._model, self._step = world, model, updates / len(updates)
        self.n = len(updates)
        self._before = world.losses(model[None], world.heldout)[0]
        self._steepness = 0.0

    @property
    def block_weights(self) -> Vector:
        return self._before.block_weights

    def value(self, coalition: Coalition) -> float:
        return float(self.parts(coalition).sum())

    def parts(self, coalition: Coalition) -> Vector:
        soup = self._model + self._step[sorted(coalition)].sum(0)
        return self._before.gain_to(self._world.losses(soup[None], self._world.heldout)[0])

    def slopes(self, shares: Vector) -> Vector:
        at = self._model + torch.tensor(shares, dtype=torch.float32) @ self._step
        world, rows = self._world, self._world.heldout
        blocks = [rows[k :: num_blocks(len(rows))] for k in range(num_blocks(len(rows)))]
        gradients = torch.cat([world.gradient(at, block) * (len(block) / len(rows)) for block in blocks])
        self._steepness = float(gradients.sum(0).norm())
        return np.asarray(-(self._step.double() @ gradients.double().T).numpy())

    def chance(self) -> Vector:
        lengths = self._step.norm(dim=1).double().numpy()
        return np.asarray(lengths * self._steepness / math.sqrt(self._step.shape[1]))


@dataclass(frozen=True)
class PlayedRound:
    """A round before its pay.

    Attributes:
        present: Contributors, in the order of the game's players.
        game: The round's game.
        true_values: By contributor, what the soup loses without the update, on all other rows.
        similarity: What the hub compares to find updates that are paid as one.
    """

    present: list[str]
    game: RoundGame
    true_values: dict[str, float]
    similarity: RoundSimilarity


class World:
    """The images, who holds which, and the model that the rounds change."""

    def __init__(self, data: str, seed: int, heldout: int, rounds: int) -> None:
        images = image_set(data)
        self.network = images.network
        generator = np.random.default_rng(seed)
        order = generator.permutation(len(images.images))
        self.images, self.labels = torch.tensor(images.images[order]), torch.tensor(images.labels[order])
        training = len(order) // 4
        self.heldout = np.arange(training, training + heldout)
        self.others = np.arange(training + heldout, len(order))
        honest = (*MEMBERS, *LATE)
        amounts = np.exp(generator.uniform(np.log(8), np.log(150), len(honest)))
        self.holds = {
            who: generator.choice(training, min(training, int(amount)), replace=False)
            for who, amount in zip(honest, amounts, strict=True)
        }
        self.steps = {who: int(generator.integers(1, 11)) for who in honest}
        self.wrong = {who: torch.zeros(len(held), dtype=torch.bool) for who, held in self.holds.items()}
        self.wrong[MEMBERS[0]] = torch.tensor(generator.random(len(self.holds[MEMBERS[0]])) < WRONG_LABELS)
        self.comes = {LATE[0]: rounds // 3, LATE[1]: 2 * rounds // 3}
        self.model = self.network.first(seed)
        self._previous: dict[str, Tensor] = {}
        self._batches = torch.Generator().manual_seed(seed)

    def play(self, number: int) -> PlayedRound:
        """Train everybody who is there, and move the model to the round's soup."""
        present = [
            who
            for who in EVERYBODY
            if number >= self.comes.get(who, 0) and not (who in MEMBERS[1:3] and number % 2)
        ]
        trained = {who: self._trained(who) for who in present if who not in NOISE}
        length = statistics.median(float(update.norm()) for update in trained.values())
        blind = torch.randn(len(NOISE), self.network.dimension, generator=self._batches)
        blind *= length / math.sqrt(self.network.dimension)
        sent = torch.stack([blind[NOISE.index(who)] if who in NOISE else trained[who] for who in present])
        game = RoundGame(self, self.model, sent)
        soup = self.model + sent.mean(0)
        without = torch.stack([soup, *(soup - one / len(sent) for one in sent)])
        whole, *others = (one.mean for one in self.losses(without, self.others))
        self.model = soup
        true_values = {who: loss - whole for who, loss in zip(present, others, strict=True)}
        return PlayedRound(present, game, true_values, self._compared(dict(zip(present, sent, strict=True))))

    def _compared(self, sent: dict[str, Tensor]) -> RoundSimilarity:
        names = list(sent)
        now = torch.nn.functional.normalize(torch.stack(list(sent.values())).double())
        previous = np.full((len(names), len(names)), np.nan)
        for place, who in enumerate(names):
            if who in self._previous:
                previous[:, place] = (now @ self._previous[who]).numpy()
        self._previous |= dict(zip(names, now, strict=True))
        apart = np.zeros((len(names), len(names)), dtype=bool)
        return RoundSimilarity({}, names, (now @ now.T).numpy(), apart, previous)

    def _trained(self, who: str) -> Tensor:
        held, wrong = self.holds[who], self.wrong[who]
        weights = self.model[None]
        for _ in range(self.steps[who]):
            drawn = torch.randint(len(held), (BATCH,), generator=self._batches)
            rows = held[drawn.numpy()]
            labels = torch.where(wrong[drawn], (self.labels[rows] + 1) % 10, self.labels[rows])
            weights = weights - LEARNING_RATE * self.network.gradient(
                weights, self.images[rows][None], labels[None]
            )
        return (weights - self.model)[0]

    def gradient(self, model: Tensor, rows: np.ndarray) -> Tensor:
        """``[1, d]`` of the mean loss on ``rows``."""
        return self.network.gradient(model[None], self.images[rows][None], self.labels[rows][None])

    def losses(self, models: Tensor, rows: np.ndarray) -> list[RowLosses]:
        """The loss on every row under each of ``[b, d]`` models."""
        images, labels = self.images[rows][None], self.labels[rows][None]
        count = len(models)
        logits = self.network.logits(models, images.expand(count, -1, -1)).transpose(1, 2)
        found = torch.nn.functional.cross_entropy(logits, labels.expand(count, -1), reduction="none")
        return [RowLosses(one, np.ones(len(rows))) for one in found.double().numpy()]
