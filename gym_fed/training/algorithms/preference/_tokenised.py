"""Code that the preference algorithms share: checks, TRL's trainers on tokenised rows, and reference models.

TRL's ORPO and CPO trainers are experimental, so any release of TRL may change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Literal

from gym_fed.base.modeling.processors import is_processor
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first, refuse_set
from gym_fed.data.row_counts import EncodedRows, RowCounts
from gym_fed.data.rows import Row
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.model.reference import copy_at_start, has_named_reference, named_reference
from gym_fed.training.rows.answers import answer_lengths, answers_of, encode_answers, iter_cut, require_some
from gym_fed.training.rows.global_batch import GlobalBatch
from gym_fed.training.run.job import Job
from gym_fed.training.vision.conversations import without_media

_Trainer: Any = object  # typed as Any, since a mix-in uses attributes of its trainer


class Pairs(Algorithm):
    """An algorithm that learns from pairs of answers to a prompt."""

    row_kind = "preference"
    learning_rate_scale = 0.05
    sequences_per_row = 2

    def check(self, config: TrainingConfig) -> None:
        check_preference(config)

    def lengths(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[int]:
        """Return the number of tokens of each prompt together with its longer answer."""
        return answer_lengths(encode_pairs(config, tokenizer, rows))

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> EncodedRows:
        """Encode prompts and answers; see ``cut_answers`` for rows longer than ``max_length``."""
        counts = RowCounts()
        encoded = EncodedRows(self._encode_each(config, tokenizer, rows, counts), counts)
        require_some(encoded, counts, config.max_length)
        return encoded

    def encode_each(
        self, config: TrainingConfig, tokenizer: Any, rows: Iterable[Row], counts: RowCounts
    ) -> Iterator[dict[str, Any]] | None:
        return None if is_processor(tokenizer) else self._encode_each(config, tokenizer, rows, counts)

    def _encode_each(
        self, config: TrainingConfig, tokenizer: Any, rows: Iterable[Row], counts: RowCounts
    ) -> Iterator[dict[str, Any]]:
        return iter_cut(encode_pairs(config, tokenizer, without_media(rows)), config.max_length, counts)


def encode_pairs(config: TrainingConfig, tokenizer: Any, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Encode the two answers of each pair; see ``encode_answers``."""
    return encode_answers(tokenizer, rows, ("chosen", "rejected"), reasoning=config.reasoning)


def check_preference(config: TrainingConfig) -> None:
    """Refuse keys that apply only to texts and conversations, and dropout, which TRL would disable."""
    keys = ("packing", "train_on_prompt", "assistant_only_loss", "mask_history")
    refuse_set(config, keys, f"not used by {config.algorithm}, which learns from answers to prompts")
    sections = config.chosen_sections()
    disables = getattr(sections.get(config.algorithm), "disable_dropout", False)
    dropouts = (
        key for key, value in sections.get(config.finetuning, ()) if key.endswith("dropout") and value
    )
    dropout = next(dropouts, None)
    reason = f"{config.finetuning}.{dropout}: {config.algorithm} disables dropout"
    remedy = f"remove it, or set {config.algorithm}.disable_dropout: false"
    refuse_first((disables and dropout is not None, reason, remedy))


def build_on_ids(job: Job, trainer: type, arguments: Any, *, reference: bool, **more: Any) -> Any:
    """Build a TRL trainer that uses the job's tokenised rows unchanged.

    Args:
        job: The run's job.
        trainer: TRL's trainer class.
        arguments: The config of the trainer.
        reference: True if the trainer needs a ``ref_model``: the model that the config specifies, or a frozen copy of
            the initial policy. No copy is made if disabling the adapter gives the initial policy, or if ``arguments``
            precompute the log-probabilities of the reference.
        more: Further arguments of the trainer.
    """
    from gym_fed.training.trl_glue import local, quiet_datasets

    adapter_off, given = False, dict[str, Any]()
    if reference:
        precomputes = bool(arguments.precompute_ref_log_probs)
        if (named := named_reference(job.config, job.model)) is not None:
            given["ref_model"] = named
        elif is_adapted(job.model) and (precomputes or starts_as_base(job)):
            adapter_off = True
            given["ref_model"] = job.model.get_base_model()
        elif not precomputes:
            given["ref_model"] = copy_at_start(job.model)
    with quiet_datasets():
        return local(_on_ids(trainer, adapter_off))(
            model=job.model,
            args=arguments,
            processing_class=job.tokenizer,
            callbacks=job.callbacks,
            **given,
            **more,
            **job.datasets(),
        )


@cache
def _on_ids(trainer: type, adapter: bool) -> type:
    mixins = (_AdapterOff, _OnIds) if adapter else (_OnIds,)
    return type(trainer.__name__, (*mixins, trainer), {"__doc__": trainer.__doc__})


def precompute(job: Job, setting: bool | None) -> bool:
    """Return True if the reference log-probabilities are computed before training; see ``ReferenceSettings``."""
    if setting is not None:
        return setting
    if job.config.distributed_strategy == "pipeline_parallel":
        return True  # a batch can pass through the stages only once
    if has_named_reference(job.config):
        return False
    return not is_adapted(job.model) or not starts_as_base(job)


def is_adapted(model: Any) -> bool:
    """Return True if ``model`` is a PEFT model."""
    return hasattr(model, "peft_config")


def starts_as_base(job: Job) -> bool:
    """Return True if a PEFT model initially has the outputs of its base, as with LoRA, but not with PiSSA."""
    from gym_fed.training.trl_glue import adapter_is_idle

    return adapter_is_idle(job.model, job.encoded[0]["prompt_ids"] or answers_of(job.encoded[0])[0])


class _OnIds(_Trainer):  # type: ignore[misc]
    """A mix-in for TRL trainers of tokenised rows."""

    _precompute_engine: Any

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the column ``length``, by which rows of similar length are grouped."""
        super()._set_signature_columns_if_needed()
        if "length" not in self._signature_columns:
            self._signature_columns.append("length")

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Return the dataset with the reference's log-probabilities as columns, in memory.

        TRL passes them through a file in the dataset's cache. For rows in memory, the cache is a folder of the main
        process that other processes cannot find.
        """
        from torch.utils.data import DataLoader

        loader = DataLoader(dataset, batch_size=batch_size, collate_fn=self.data_collator, shuffle=False)
        loader = self.accelerator.prepare(loader)
        model = self.ref_model or self.model
        if self.ref_model is None and self.is_deepspeed_enabled:
            from trl.models.utils import prepare_deepspeed

            if self._precompute_engine is None:
                self._precompute_engine = prepare_deepspeed(self.model, self.accelerator)
            model = self._precompute_engine
        columns: dict[str, list[float]] = {}
        for batch in loader:
            values = self.compute_ref_log_probs(model, batch)
            for column, value in zip(self._reference_columns(), values, strict=True):
                if value is not None:
                    columns.setdefault(column, []).extend(self.accelerator.gather_for_metrics(value).tolist())
        for column, numbers in columns.items():
            dataset = dataset.add_column(column, numbers)
        return dataset

    def _reference_columns(self) -> tuple[str, str]:
        """Return the collator's names for the two tensors that ``compute_ref_log_probs`` returns."""
        if hasattr(self, "calculate_KL"):
            return "ref_logps", "ref_KL_logps"
        return "ref_chosen_logps", "ref_rejected_logps"


class _AdapterOff(_Trainer):  # type: ignore[misc]
    """A mix-in for PEFT models whose reference is the model with its adapter disabled, so that no copy is needed.

    Without a reference, TRL would copy the adapter to one named ``ref``. The copy would stay on the model and be saved
    with it. It cannot be made for AdaLoRA, and would subtract PiSSA's factors from the base a second time. A reference
    is therefore passed, and then discarded. Precomputed log-probabilities are those of the initial adapter, which may
    differ from the base's.
    """

    _starting = False

    @property
    def ref_model(self) -> Any:
        return self.model if self._starting else None

    @ref_model.setter
    def ref_model(self, value: Any) -> None:
        """Discard the reference model."""

    def _precompute_ref_logps(self, *args: Any) -> Any:
        self._starting = True
        try:
            return super()._precompute_ref_logps(*args)
        finally:
            self._starting = False


class WholePairs(Pairs):
    """Pairs, encoded as whole sequences for the collator of TRL's ORPO and CPO trainers."""

    multiplies_by_head = False

    @classmethod
    def logits(cls, config: TrainingConfig) -> Literal["tiled", "whole", "none"]:
        return "whole"

    def _encode_each(
        self, config: TrainingConfig, tokenizer: Any, rows: Iterable[Row], counts: RowCounts
    ) -> Iterator[dict[str, Any]]:
        return map(_with_labels, super()._encode_each(config, tokenizer, rows, counts))


def _with_labels(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that the collator expects: whole sequences, with attention masks and labels."""
    prompt = row["prompt_ids"]
    columns: dict[str, Any] = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
    for key in ("chosen", "rejected"):
        answer = row[f"{key}_ids"]
        columns[f"{key}_input_ids"] = prompt + answer
        columns[f"{key}_attention_mask"] = [1] * (len(prompt) + len(answer))
        columns[f"{key}_labels"] = [-100] * len(prompt) + answer
    return {**columns, "length": row["length"]}


class _Tokenised(GlobalBatch):
    """A mix-in for ``ORPOTrainer`` and ``CPOTrainer`` on tokenised rows, which also counts tokens.

    Their loss is a mean over pairs plus a mean over tokens, which is the next-token loss of the chosen answer.
    """

    pair_loss: Callable[..., Any]
    """Set after construction: the formula of ``orpo.py`` or ``simpo.py``."""

    _num_tokens = 0
    _nll: Any = None

    def items(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Count pairs, and the tokens of the next-token loss, which for ORPO includes the prompt."""
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
        self._num_tokens += int(self.accelerator.gather_for_metrics(masks.to(self.args.device)).sum())
        return super().training_step(model, inputs, *args)

    def log(self, logs: dict[str, float], *args: Any) -> None:
        super().log({**logs, "num_tokens": self._num_tokens} if "loss" in logs else logs, *args)


class OddsRatios(_Tokenised):
    """A mix-in for ``ORPOTrainer`` that uses the odds-ratio loss of ``orpo.py``."""

    answer_nll = False
    """Set after construction: True if the next-token loss is that of the chosen answer, averaged over pairs."""

    def concatenated_forward(self, *args: Any, **named: Any) -> Any:
        """Run TRL's forward pass; with ``answer_nll``, replace its next-token loss, which includes the prompt."""
        outputs = super().concatenated_forward(*args, **named)
        if not self.answer_nll:
            return outputs
        self._nll = None  # a mean over pairs, like the rest of the loss
        return (*outputs[:4], -outputs[0].mean(), *outputs[5:])

    def odds_ratio_loss(self, policy_chosen_logps: Any, policy_rejected_logps: Any) -> tuple[Any, ...]:
        """Return the term ``[n]`` that TRL subtracts from the next-token loss, two rewards ``[n]``, and two means."""
        chosen, rejected = policy_chosen_logps.float(), policy_rejected_logps.float()
        loss, log_odds_ratio = self.pair_loss(chosen, rejected)
        rewards = self.beta * chosen.detach(), self.beta * rejected.detach()
        return -self.beta * loss, *rewards, -loss.mean(), log_odds_ratio.mean()


class Margins(_Tokenised):
    """A mix-in for ``CPOTrainer`` that uses the pair loss of ``simpo.py``."""

    def cpo_loss(self, policy_chosen_logps: Any, policy_rejected_logps: Any) -> tuple[Any, ...]:
        """Return the losses, and the two rewards that TRL logs, each ``[n]``."""
        chosen, rejected = policy_chosen_logps, policy_rejected_logps
        return self.pair_loss(chosen, rejected), self.beta * chosen.detach(), self.beta * rejected.detach()


@cache
def with_pair_loss(trainer: type, losses: type) -> type:
    """Return a TRL trainer class for rows of ``WholePairs``, with the mix-in ``losses``."""
    return type(trainer.__name__, (losses, trainer), {"__doc__": trainer.__doc__})
