"""Direct preference optimisation: raise the policy/reference log-ratio of chosen answers above that of rejected ones.

With ``h_w = log pi(y_w|x) - log ref(y_w|x)``, ``h_l`` the same for the rejected answer, and log-probabilities summed
over the answer's tokens, the loss of a pair is ``-log sigmoid(beta * (h_w - h_l))``: Rafailov et al. 2023, "Direct
Preference Optimization", equation 7 (``loss_type: sigmoid``). The other losses use the same two log-ratios.

``trl.trainer.dpo_trainer.DPOTrainer._compute_loss`` computes all of them; ``DpoMeans`` averages them over the whole
step. ``tests/unit/training/test_losses_on_the_page.py`` compares the trainer's loss with the formula.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from gym_fed.base.modeling.processors import is_processor
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.data.row_counts import EncodedRows
from gym_fed.data.rows import Row
from gym_fed.training.algorithms.preference._tokenised import Pairs, build_on_ids, precompute
from gym_fed.training.run.job import Job


class Dpo(Pairs):
    """DPO with TRL's ``DPOTrainer``."""

    uses_reference = True
    takes_reference = True
    # 0.25 gives 5e-5 with LoRA. At 0.05, the scale of the other algorithms, margins do not change; at 0.5, the model
    # forgets.
    learning_rate_scale = 0.25
    federates = True
    splits_rows = True
    pipelines = True
    # On a few dozen pairs, DPO alone makes both answers unlikely: after 30 pairs, gym-nano generated neither.
    of_few_rows = MappingProxyType({"loss_type": ["sigmoid", "sft"]})
    reads_images = True
    tried = "full, LoRA; images and audio; federated rounds with both; two processes"

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> EncodedRows:
        if not is_processor(tokenizer):
            return super().encode(config, tokenizer, rows)
        from gym_fed.training.vision.pairs import encode_media_pairs

        reason = "dpo.precompute_ref_log_probs: not supported for pairs with media"
        refuse_first((self.settings(config).precompute_ref_log_probs, reason, "remove it"))
        return encode_media_pairs(config, tokenizer, rows)

    def build(self, job: Job) -> Any:
        from trl import DPOConfig

        from gym_fed.training.algorithms.preference._trainers import DpoMeans

        settings = self.settings(job.config)
        values = settings.model_dump(exclude={"precompute_ref_log_probs"})
        has_media = is_processor(job.tokenizer)
        arguments = DPOConfig(
            **job.arguments(),
            **values,
            max_length=None,  # rows are already truncated
            precompute_ref_log_probs=not has_media and precompute(job, settings.precompute_ref_log_probs),
            remove_unused_columns=not has_media,
        )
        if not has_media:
            return build_on_ids(job, DpoMeans, arguments, reference=True)
        from gym_fed.training.vision.pairs import PairBatches
        from gym_fed.training.vision.trainer import media_batches

        collator = PairBatches(media_batches(job))
        return build_on_ids(job, DpoMeans, arguments, reference=True, data_collator=collator)
