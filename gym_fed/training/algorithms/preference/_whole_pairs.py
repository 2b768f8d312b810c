"""TRL's experimental ORPO and CPO trainers for rows that are tokenised here; any release of TRL may change them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from gym_fed.config.train.training import TrainingConfig
from gym_fed.data.row_counts import EncodedRows
from gym_fed.data.rows import Row
from gym_fed.training.algorithms.preference._answers import Pairs
from gym_fed.training.rows.global_batch import GlobalBatch


class WholePairs(Pairs):
    """The encoding of pairs for these trainers' collator."""

    multiplies_by_head = False

    @classmethod
    def logits(cls, config: TrainingConfig) -> Literal["tiled", "whole", "none"]:
        return "whole"

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> EncodedRows:
        """Encode whole sequences with masks and labels."""
        pairs = super().encode(config, tokenizer, rows)
        return EncodedRows(map(_whole, pairs), pairs.counts)


def _whole(row: dict[str, Any]) -> dict[str, Any]:
    prompt = row["prompt_ids"]
    whole: dict[str, Any] = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
    for key in ("chosen", "rejected"):
        answer = row[f"{key}_ids"]
        whole[f"{key}_input_ids"] = prompt + answer
        whole[f"{key}_attention_mask"] = [1] * (len(prompt) + len(answer))
        whole[f"{key}_labels"] = [-100] * len(prompt) + answer
    return {**whole, "length": row["length"]}


class _Tokenised(GlobalBatch):
    """A mix-in, placed before one of the two, for tokenised rows; it counts tokens as TRL's other trainers do.

    Their loss is a mean over pairs plus one over tokens, the chosen answer's next-token loss.
    """

    pair_loss: Callable[..., Any]
    """Set after construction: the formula of ``orpo.py`` or ``simpo.py``."""

    _seen = 0
    _nll: Any = None

    def items(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Count pairs, and the tokens of the next-token loss; ORPO's includes the prompt."""
        learned = (
            batch["chosen_labels"] != -100 if hasattr(self, "cpo_alpha") else batch["chosen_attention_mask"]
        )
        return {"pairs": len(learned), "tokens": (learned[:, 1:] == 1).sum()}

    def concatenated_forward(self, *args: Any, **named: Any) -> Any:
        """Run TRL's forward pass and store its next-token loss, which is weighted separately."""
        outputs = super().concatenated_forward(*args, **named)
        self._nll = outputs[4]
        return outputs

    def get_batch_loss_metrics(self, model: Any, batch: dict[str, Any], train_eval: str = "train") -> Any:
        """Return TRL's loss, weighted: ``nll_weight * mean over tokens + mean over pairs``."""
        loss, metrics = super().get_batch_loss_metrics(model, batch, train_eval)
        if self._nll is None:
            return loss * self.share("pairs", len(batch["chosen_labels"])), metrics
        counts = self.items(batch)
        pairs, tokens = (self.share(name, counts[name]) for name in ("pairs", "tokens"))
        nll_weight = getattr(self, "cpo_alpha", 1.0)
        return loss * pairs + nll_weight * self._nll * (tokens - pairs), metrics

    @staticmethod
    def tokenize_row(row: dict[str, Any]) -> dict[str, Any]:
        return row

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any) -> Any:
        masks: Any = sum(inputs[f"{key}_attention_mask"].sum() for key in ("chosen", "rejected"))
        self._seen += int(self.accelerator.gather_for_metrics(masks.to(self.args.device)).sum())
        return super().training_step(model, inputs, *args)

    def log(self, logs: dict[str, float], *args: Any) -> None:
        super().log({**logs, "num_tokens": self._seen} if "loss" in logs else logs, *args)


class OddsRatios(_Tokenised):
    """A mix-in, placed before ``ORPOTrainer``, that uses the odds-ratio loss of ``orpo.py``."""

    answer_nll = False
    """Set after construction: whether the next-token loss is the mean over pairs of the answer's own."""

    def concatenated_forward(self, *args: Any, **named: Any) -> Any:
        """Run TRL's forward pass; its next-token loss, which includes the prompt, is replaced where that is not
        wanted."""
        outputs = super().concatenated_forward(*args, **named)
        if not self.answer_nll:
            return outputs
        self._nll = None  # a mean over pairs, as the rest of the loss
        return (*outputs[:4], -outputs[0].mean(), *outputs[5:])

    def odds_ratio_loss(self, policy_chosen_logps: Any, policy_rejected_logps: Any) -> tuple[Any, ...]:
        """Return the term that TRL subtracts from the next-token loss, ``[n]``, rewards ``[n]``, and two means to
        log."""
        chosen, rejected = policy_chosen_logps.float(), policy_rejected_logps.float()
        loss, log_odds_ratio = self.pair_loss(chosen, rejected)
        rewards = self.beta * chosen.detach(), self.beta * rejected.detach()
        return -self.beta * loss, *rewards, -loss.mean(), log_odds_ratio.mean()


class Margins(_Tokenised):
    """A mix-in, placed before ``CPOTrainer``, that uses the pair loss of ``simpo.py``."""

    def cpo_loss(self, policy_chosen_logps: Any, policy_rejected_logps: Any) -> tuple[Any, ...]:
        """Return losses and the two rewards that TRL logs, each ``[n]``."""
        chosen, rejected = policy_chosen_logps, policy_rejected_logps
        return self.pair_loss(chosen, rejected), self.beta * chosen.detach(), self.beta * rejected.detach()


@cache
def whole_pairs(trainer: type, losses: type) -> type:
    """Return ``trainer`` for rows of ``WholePairs``, with the mix-in ``losses`` before it."""
    return type(trainer.__name__, (losses, trainer), {"__doc__": trainer.__doc__})
