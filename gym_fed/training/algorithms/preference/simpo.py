"""Simple preference optimisation, Meng et al. 2024, "SimPO", with TRL's experimental ``CPOTrainer``.

The loss is ``simpo_loss`` plus ``cpo_alpha`` times the chosen answer's next-token loss.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gym_fed.training.algorithms.preference._tokenised import (
    Margins,
    WholePairs,
    build_on_ids,
    with_pair_loss,
)
from gym_fed.training.run.job import Job

if TYPE_CHECKING:
    from torch import Tensor


class Simpo(WholePairs):
    """SimPO: the reward is the mean log-probability, and no reference model is needed."""

    federates = True
    tried = "full, LoRA"
    untried = "images; several processes"

    def build(self, job: Job) -> Any:
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        settings = self.settings(job.config)
        arguments = CPOConfig(
            **job.arguments(),
            **settings.model_dump(exclude={"gamma"}),
            simpo_gamma=settings.gamma,
            loss_type="simpo",
            max_length=job.config.max_length,
            remove_unused_columns=False,
        )
        trainer = build_on_ids(job, with_pair_loss(CPOTrainer, Margins), arguments, reference=False)
        weights = settings.model_dump(include={"beta", "gamma", "label_smoothing"})
        trainer.pair_loss = partial(simpo_loss, **weights)
        return trainer


def simpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float, gamma: float, label_smoothing: float
) -> Tensor:
    """Return ``-log sigmoid(beta * log pi(y_w|x) / |y_w| - beta * log pi(y_l|x) / |y_l| - gamma)`` (equation 6).

    Args:
        chosen: ``[n]`` mean log-probabilities per token of the chosen answers.
        rejected: ``[n]`` mean log-probabilities per token of the rejected answers.
        beta: Scale of the reward, which is the mean log-probability.
        gamma: The target reward margin.
        label_smoothing: Assumed fraction of pairs with swapped labels.

    Returns:
        ``[n]``.
    """
    from torch.nn.functional import logsigmoid

    margin = beta * (chosen - rejected) - gamma
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
