"""The trainer: a config (and perhaps a model in memory) in, a trained model and a run folder out.

Algorithms live in ``algorithms/``; the loop itself is TRL's. A run that was stopped or killed is continued from
its last checkpoint and ends with the same weights as one that was not.
"""

from __future__ import annotations

import hashlib
import warnings
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_fed.config.training import TrainingConfig
from gym_fed.errors import ErrorCode, GymError
from gym_fed.models import load_model, pick_device, quiet_loading
from gym_fed.training.algorithms import get_algorithm
from gym_fed.training.hooks import OnStep, RunHooks, ShouldStop
from gym_fed.training.lora import add_lora
from gym_fed.training.run_folder import RunFolder
from gym_fed.training.saving import save_final
from gym_fed.training.trl_glue import unpatched_afterwards


@dataclass(frozen=True)
class TrainResult:
    """What a run gave.

    Attributes:
        steps: Optimiser steps of the whole run, those before a resume included.
        final_loss: Mean loss of the last ``logging_steps`` steps, in nats per token.
        losses: Loss of every step.
        output_dir: The run folder.
        num_examples: Rows trained on (each counted once).
        num_tokens: Tokens seen, repeats included, padding not.
        model: The trained model, in evaluation mode: the one handed in, or a PEFT model around it.
        tokenizer: Its tokenizer.
    """

    steps: int
    final_loss: float
    losses: list[float]
    output_dir: Path
    num_examples: int
    num_tokens: int
    model: Any = field(repr=False, compare=False)
    tokenizer: Any = field(repr=False, compare=False)

    def summary(self) -> dict[str, Any]:
        """The figures, without losses and objects, ready for JSON."""
        keep = ("steps", "final_loss", "num_examples", "num_tokens")
        return {key: getattr(self, key) for key in keep} | {"output_dir": str(self.output_dir)}


class Trainer:
    """Trains one model by one config.

    Args:
        config: What to do.
        model: Train this model in place instead of loading ``config.model`` (under ``finetuning: lora`` its weights
            stay as they are, and the result's model is a PEFT wrapper; ``unload()`` gives the model back).
        tokenizer: Goes with ``model``.
        on_step: Called after every optimiser step with ``(step, total, loss)``.
        should_stop: Asked after every step; True saves a checkpoint and raises ``INTERRUPTED``.
    """

    def __init__(
        self,
        config: TrainingConfig,
        *,
        model: Any = None,
        tokenizer: Any = None,
        on_step: OnStep | None = None,
        should_stop: ShouldStop | None = None,
    ) -> None:
        if (model is None) != (tokenizer is None):
            raise GymError(ErrorCode.USAGE, "a model in memory needs its tokenizer, and the other way round")
        if model is None and config.model is None and config.model_init is None:
            raise GymError(ErrorCode.CONFIG_INVALID, "model: not given", "name a model, or give model_init")
        self.config = config
        self._given = None if model is None else (model, tokenizer)
        self._on_step = on_step
        self._should_stop = should_stop

    def train(self, dataset: Sequence[dict[str, Any]] | None = None, resume: bool = True) -> TrainResult:
        """Run to the end, from the last checkpoint if there is one.

        Args:
            dataset: Rows (``messages`` or ``text``) instead of ``config.data``.
            resume: False refuses an unfinished run in ``output_dir`` instead of continuing it.

        Raises:
            GymError: ``INTERRUPTED`` after ``should_stop``; ``FILE_EXISTS``, ``DATA_INVALID``, ``MODEL_NOT_FOUND`` and
                ``CONFIG_INVALID`` before anything is written.
        """
        import torch
        from transformers import PrinterCallback, set_seed

        config = self.config
        algorithm = get_algorithm(config.algorithm)
        device = pick_device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        folder = RunFolder(config.output_dir)
        folder.require_unfinished()
        if dataset is None:
            from gym_fed.training.sources import rows_of

            dataset = rows_of(config)
        model, tokenizer = self._given or self._load()
        encoded = algorithm.encode(config, tokenizer, list(dataset))
        checkpoint = folder.open(config, _digest(encoded), resume=resume)

        set_seed(config.seed)
        model = model.to(device)
        if config.finetuning == "lora":
            model = add_lora(model, config.lora, seed=config.seed)
        else:
            model.requires_grad_(True)  # a model that an adapter was merged into or taken off is still frozen
        hooks = RunHooks(folder.metrics, config.logging_steps, self._on_step, self._should_stop)
        with quiet_loading(), unpatched_afterwards(model), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # of transformers, about its own next major version
            trainer = algorithm.build(config, model, tokenizer, encoded, folder.checkpoints, [hooks])
            trainer.remove_callback(PrinterCallback)
            if checkpoint is None:
                trainer.train()
            elif not _is_at_end(checkpoint, trainer, hooks):
                trainer.train(resume_from_checkpoint=str(checkpoint))
        model.zero_grad(set_to_none=True)
        model.eval()
        steps = int(trainer.state.global_step)
        if hooks.stopped:
            raise GymError(
                ErrorCode.INTERRUPTED,
                f"stopped at step {steps} of {trainer.state.max_steps}; a checkpoint is in {folder.checkpoints}",
                f"resume with: gym train {folder.path / 'config.yaml'}",
            )
        last = hooks.losses[-config.logging_steps :]
        result = TrainResult(
            steps=steps,
            final_loss=sum(last) / len(last),
            losses=hooks.losses,
            output_dir=folder.path,
            num_examples=len(dataset),
            num_tokens=hooks.num_tokens,
            model=model,
            tokenizer=tokenizer,
        )
        if config.save_final:
            with quiet_loading():
                save_final(model, tokenizer, config, folder.path)
            folder.finish(result.summary())
        return result

    def _load(self) -> tuple[Any, Any]:
        config = self.config
        if config.model_init is not None:
            from gym_fed.training.scratch import init_model

            return init_model(config.model_init, seed=config.seed, dtype=config.dtype)
        assert config.model is not None  # the constructor refuses this
        loaded = load_model(config.model, dtype=config.dtype)
        if not hasattr(loaded.model, "merge_and_unload"):
            return loaded.model, loaded.tokenizer
        if config.finetuning == "lora":
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"model: {config.model} is itself a LoRA adapter",
                "train on with finetuning: full, or start from its base model",
            )
        return loaded.model.merge_and_unload(), loaded.tokenizer


def _is_at_end(checkpoint: Path, trainer: Any, hooks: RunHooks) -> bool:
    """Whether a checkpoint holds the last step; if so its weights are loaded, for transformers would do one more."""
    from transformers.trainer_callback import TrainerState

    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if state.global_step < state.max_steps:
        return False
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = state
    hooks.on_train_begin(trainer.args, state, trainer.control)
    return True


def _digest(encoded: list[dict[str, list[int]]]) -> str:
    """Digest of what is trained on, so that a resumed run cannot silently continue on other rows."""
    digest = hashlib.sha256()
    for row in encoded:
        for key in sorted(row):
            digest.update(array("q", [len(row[key]), *row[key]]).tobytes())
    return digest.hexdigest()
