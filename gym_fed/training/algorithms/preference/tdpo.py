"""Token-level direct preference optimisation: Zeng et al. 2024, "Token-level Direct Preference Optimization".

With ``u`` the DPO margin ``log pi(y_w|x)/ref(y_w|x) - log pi(y_l|x)/ref(y_l|x)`` and the sequential KL
``D(x, y) = sum_t KL(ref(.|x, y_<t) || pi(.|x, y_<t))``:

- TDPO1: ``-log sigmoid(beta * (u - (D(x, y_l) - D(x, y_w))))``
- TDPO2: ``-log sigmoid(beta * (u - alpha * (D(x, y_l) - stop_gradient(D(x, y_w)))))``
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from gym_fed.config.algorithms.preference import TdpoSettings
from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.algorithms.preference._tokenised import Pairs, build_on_ids
from gym_fed.training.run.job import Job

if TYPE_CHECKING:
    import torch


class Tdpo(Pairs):
    """TDPO with TRL's ``DPOTrainer``; every step computes the reference's full distributions."""

    uses_reference = True
    takes_reference = True
    federates = True
    tried = "full, LoRA; both variants"
    untried = "several processes"

    @classmethod
    def logits(cls, config: TrainingConfig) -> Literal["tiled", "whole", "none"]:
        return "whole"

    def build(self, job: Job) -> Any:
        from trl import DPOConfig

        from gym_fed.training.algorithms.preference._trainers import TdpoTrainer

        settings = self.settings(job.config)
        arguments = DPOConfig(
            **job.arguments(),
            beta=settings.beta,
            disable_dropout=settings.disable_dropout,
            max_length=None,  # rows are already truncated
        )
        trainer = build_on_ids(job, TdpoTrainer, arguments, reference=True)
        trainer.answer_terms = answer_terms
        trainer.pair_loss = lambda chosen, rejected: tdpo_loss(chosen, rejected, settings)
        return trainer


def answer_terms(
    logits: torch.Tensor, reference: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the answers' log-probabilities, followed by the two terms of TDPO's loss: log-ratios and sequential KLs.

    Args:
        logits: ``[n, length, vocabulary]`` logits of the policy.
        reference: ``[n, length, vocabulary]`` logits of the reference.
        labels: ``[n, length]`` int64: the token at each position, -100 outside the answer.

    Returns:
        Three tensors ``[n]``: ``log pi(y|x)``, ``log pi(y|x) / ref(y|x)``, and ``D(x, y)``.
    """
    targets = labels[:, 1:]
    mask = targets != -100
    rows = mask.nonzero()[:, 0]
    policy = logits[:, :-1][mask].log_softmax(-1)  # only the positions in the answers
    start = reference[:, :-1][mask].log_softmax(-1)
    token = targets[mask].unsqueeze(-1)
    log_probs = policy.gather(-1, token).squeeze(-1)
    log_ratios = log_probs - start.gather(-1, token).squeeze(-1)
    kls = (start.exp() * (start - policy)).sum(-1)
    empty = policy.new_zeros(len(labels))
    log_prob, log_ratio, sequential_kl = (
        empty.index_add(0, rows, value) for value in (log_probs, log_ratios, kls)
    )
    return log_prob, log_ratio, sequential_kl


def tdpo_loss(
    chosen: tuple[torch.Tensor, torch.Tensor],
    rejected: tuple[torch.Tensor, torch.Tensor],
    settings: TdpoSettings,
) -> torch.Tensor:
    """Return the TDPO1 or TDPO2 loss of pairs, ``[n]``.

    Args:
        chosen: Log-ratios to the reference and sequential KLs of the chosen answers, ``[n]`` each.
        rejected: Log-ratios and sequential KLs of the rejected answers, ``[n]`` each.
        settings: ``variant``, ``beta`` and, for variant 2, ``alpha``.
    """
    from torch.nn.functional import logsigmoid

    u = chosen[0] - rejected[0]
    if settings.variant == 1:
        return -logsigmoid(settings.beta * (u - (rejected[1] - chosen[1])))
    return -logsigmoid(settings.beta * (u - settings.alpha * (rejected[1] - chosen[1].detach())))
