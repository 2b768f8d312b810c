"""Odds-ratio preference optimisation, Hong et al. 2024, "ORPO", with TRL's experimental ``ORPOTrainer``.

``L = L_NLL(y_w) + beta * L_OR`` (equation 6): the next-token loss of the chosen answer, with its prompt or alone
(``nll``), and ``odds_ratio_loss``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gym_fed.training.algorithms.preference._tokenised import (
    OddsRatios,
    WholePairs,
    build_on_ids,
    with_pair_loss,
)
from gym_fed.training.run.job import Job

if TYPE_CHECKING:
    from torch import Tensor


class Orpo(WholePairs):
    """ORPO: learns the chosen answer with its prompt (next-token loss) and an odds ratio against the rejected one."""

    federates = True
    tried = "full, LoRA; two processes"
    untried = "images"

    def build(self, job: Job) -> Any:
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        settings = self.settings(job.config)
        arguments = ORPOConfig(
            **job.arguments(),
            **settings.model_dump(exclude={"nll"}),
            max_length=job.config.max_length,
            remove_unused_columns=False,
        )
        trainer = build_on_ids(job, with_pair_loss(ORPOTrainer, OddsRatios), arguments, reference=False)
        trainer.pair_loss = odds_ratio_loss
        trainer.answer_nll = settings.nll == "answer"
        return trainer


def odds_ratio_loss(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``L_OR = -log sigmoid(log(odds(y_w|x) / odds(y_l|x)))``, with ``odds(y|x) = P(y|x) / (1 - P(y|x))``.

    Equations 4 and 7; ``log P(y|x)`` is the mean over the answer's tokens (equation 3).

    Args:
        chosen: ``[n]`` float32 log-probabilities of the chosen answers.
        rejected: ``[n]`` float32 log-probabilities of the rejected answers.

    Returns:
        ``L_OR`` and the log odds ratio, each ``[n]``.
    """
    from torch.nn.functional import logsigmoid

    log_odds_ratio = (chosen - _log1mexp(chosen)) - (rejected - _log1mexp(rejected))
    return -logsigmoid(log_odds_ratio), log_odds_ratio


def _log1mexp(x: Tensor) -> Tensor:
    """Return ``log(1 - exp(x))`` for ``x < 0``, by the formula that is stable near 0 or the one far below it."""
    import torch

    return torch.where(x < -math.log(2), torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))
