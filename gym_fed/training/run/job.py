"""A training job, which is the input of an algorithm's ``build``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.models import pick_device
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import OPTIMIZERS
from gym_fed.data.training_rows import TrainingRows
from gym_fed.training.model.template_tokens import num_embeddings

if TYPE_CHECKING:
    from gym_fed.evaluation.graders.base import Grader


@dataclass
class Job:
    """The argument of ``Algorithm.build``.

    Attributes:
        config: The run's config.
        model: The model to train in place, wrapped by PEFT if ``finetuning`` is an adapter method.
        tokenizer: The model's tokenizer (a processor for vision-language models).
        encoded: Encoded training rows.
        eval_encoded: Encoded rows of ``eval_data``; None if there are none.
        checkpoints: Folder for the checkpoints.
        callbacks: ``transformers.TrainerCallback`` objects to install.
        graders: Initialised graders; empty for algorithms without rewards.
        evaluate_first: True to evaluate the held-out rows before the first step.
        resources: Context managers that are closed when the run ends or fails.
    """

    config: TrainingConfig
    model: Any
    tokenizer: Any
    encoded: Sequence[dict[str, Any]]
    eval_encoded: Sequence[dict[str, Any]] | None
    checkpoints: Path
    callbacks: list[Any]
    graders: Sequence[Grader] = field(default=())
    evaluate_first: bool = False
    resources: ExitStack = field(default_factory=ExitStack)

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments of every TRL config; see ``common_arguments``."""
        arguments = common_arguments(self.config, self.checkpoints, evaluate=self.eval_encoded is not None)
        return {**arguments, "eval_on_start": self.evaluate_first and self.eval_encoded is not None}

    def datasets(self) -> dict[str, Any]:
        """Return ``train_dataset`` and ``eval_dataset`` (or None) as ``datasets.Dataset``."""
        return {
            "train_dataset": as_dataset(self.encoded, self.model),
            "eval_dataset": None if self.eval_encoded is None else as_dataset(self.eval_encoded, self.model),
        }


def as_dataset(encoded: Any, model: Any) -> Any:
    """Return encoded rows as a ``datasets.Dataset``; missing keys of a row become None."""
    if isinstance(encoded, TrainingRows):
        return encoded.as_dataset(num_embeddings(model))
    from datasets import Dataset

    keys = list(dict.fromkeys(key for row in encoded for key in row))
    return Dataset.from_dict({key: [row.get(key) for row in encoded] for key in keys})


def common_arguments(config: TrainingConfig, checkpoints: Path, *, evaluate: bool = False) -> dict[str, Any]:
    """Return keyword arguments for any subclass of ``transformers.TrainingArguments``.

    Some defaults of TRL are overridden: mixed precision and gradient checkpointing are off unless set, nothing is
    reported or pushed, and every step is logged so that ``RunHooks`` gets its loss.
    """
    from gym_fed.training.features.base import feature_arguments
    from gym_fed.training.processes.sharding import trainer_arguments

    order = "group_by_length" if config.group_by_length else "random"
    default_evaluation = "steps" if config.eval_steps else "epoch"
    return {
        "output_dir": str(checkpoints),
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": config.lr_scheduler_type,
        "lr_scheduler_kwargs": dict(config.lr_scheduler_kwargs) or None,
        "warmup_steps": config.warmup_ratio or config.warmup_steps,  # below 1, it is a fraction
        "weight_decay": config.weight_decay,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "max_grad_norm": config.max_grad_norm,
        "max_steps": -1 if config.max_steps is None else config.max_steps,
        "num_train_epochs": config.num_train_epochs,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "per_device_eval_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "train_sampling_strategy": order if config.shuffle else "sequential",
        "gradient_checkpointing": False,
        "bf16": False,
        "fp16": False,
        "seed": config.seed,
        # Also needed without a GPU, since otherwise every process would train a separate model.
        "use_cpu": pick_device(config.device).type == "cpu",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": config.save_strategy or ("steps" if config.save_steps else "no"),
        "save_steps": config.save_steps or 1,
        "save_total_limit": config.save_total_limit,
        "report_to": "none",
        "eval_strategy": (config.eval_strategy or default_evaluation) if evaluate else "no",
        "eval_steps": config.eval_steps or None,
        "push_to_hub": False,
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "ignore_data_skip": config.streaming,  # a stream skips learned rows itself
        **OPTIMIZERS.new(config.optimizer).arguments(config),
        **trainer_arguments(config),
        **feature_arguments(config),
    }
