"""Direct preference optimisation: the log-ratio to the reference grows for chosen answers against rejected ones.

With ``h_w = log pi(y_w|x) - log ref(y_w|x)``, ``h_l`` the same of the rejected answer, and log-probabilities summed
over the answer's tokens, the loss of a pair is ``-log sigmoid(beta * (h_w - h_l))``: Rafailov et al. 2023, "Direct
Preference Optimization", equation 7 (``loss_type: sigmoid``). The other losses use the same two log-ratios.

All of them are computed by ``trl.trainer.dpo_trainer.DPOTrainer._compute_loss``; ``DpoMeans`` takes their means over
the whole step. ``tests/unit/training/test_losses_on_the_page.py`` compares the trainer's loss with the formula.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from gym_fed.training.algorithms.preference._tokenised import Pairs, build_on_ids, precompute
from gym_fed.training.run.job import Job


class Dpo(Pairs):
    """DPO by TRL's ``DPOTrainer``."""

    uses_reference = True
    takes_reference = True
    # 5e-5 with LoRA. A twentieth, as for the other algorithms, does not change margins; with a half the model forgets.
    learning_rate_scale = 0.25
    federates = True
    # Alone, DPO on a few dozen pairs makes both answers unlikely: from 30 pairs, gym-nano learnt to write neither.
    of_few_rows = MappingProxyType({"loss_type": ["sigmoid", "sft"]})
    tried = "full, LoRA; federated rounds with both; two processes"
    untried = "pictures"

    def build(self, job: Job) -> Any:
        from trl import DPOConfig

        from gym_fed.training.algorithms.preference._trainers import DpoMeans

        settings = self.settings(job.config)
        values = settings.model_dump(exclude={"precompute_ref_log_probs"})
        arguments = DPOConfig(
            **job.arguments(),
            **values,
            max_length=None,  # cut already
            precompute_ref_log_probs=precompute(job, settings.precompute_ref_log_probs),
        )
        return build_on_ids(job, DpoMeans, arguments, reference=True)
