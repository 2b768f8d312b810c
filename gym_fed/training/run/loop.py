"""Run a trainer to its last step (start, resume, roll back after a spike), then create and save the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gym_fed.base.models import quiet_loading
from gym_fed.config.train.run import MAX_INTERVAL
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import full_disk_named
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.model.saving import save_final
from gym_fed.training.processes import group as processes
from gym_fed.training.processes.peers import stop_watching
from gym_fed.training.rows.tokenized import RunRows
from gym_fed.training.run.check import LearningCheck
from gym_fed.training.run.checkpoints import step_of
from gym_fed.training.run.early_stopping import EarlyStop
from gym_fed.training.run.folder import RunFolder
from gym_fed.training.run.hooks import RunHooks
from gym_fed.training.run.result import TrainResult
from gym_fed.training.run.spikes import Rollbacks, require_finite

DELTA_NAME = "tuned.gymdelta"


def run_to_end(
    trainer: Any,
    checkpoint: Path | None,
    hooks: RunHooks,
    folder: RunFolder,
    rollbacks: Rollbacks | None,
    early_stop: EarlyStop | None,
) -> None:
    """Train from ``checkpoint`` (or the first step) until the run ends, is stopped, or has too many spikes.

    Raises:
        Diverged: If the loss is not finite, or has too many spikes.
        GymError: ``DISK_FULL`` if a checkpoint, metrics or weights cannot be written; see the callbacks for others.
    """
    if rollbacks is not None:
        trainer.wrap_dataloader = rollbacks.wrap
    while True:
        with full_disk_named(folder.path):
            if checkpoint is None:
                trainer.train()
            elif not _is_at_end(checkpoint, trainer, hooks, early_stop):
                trainer.train(resume_from_checkpoint=str(checkpoint))
        if hooks.spike is None or rollbacks is None:
            return
        checkpoint = _roll_back(trainer, hooks, folder, rollbacks)


def _roll_back(trainer: Any, hooks: RunHooks, folder: RunFolder, rollbacks: Rollbacks) -> Path:
    assert hooks.spike is not None
    last = processes.on_main(lambda: str(folder.last_checkpoint() or ""))
    rollbacks.add(hooks.spike, step_of(Path(last)) if last else None, trainer)
    return Path(last)  # ``add`` refuses a rollback without a checkpoint


def _is_at_end(checkpoint: Path, trainer: Any, hooks: RunHooks, early_stop: EarlyStop | None) -> bool:
    """Load a checkpoint of the last step and return True, since transformers would run one more step from it."""
    from transformers.trainer_callback import TrainerState

    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if state.global_step < state.max_steps and not (early_stop and early_stop.is_over(state)):
        return False
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = state
    hooks.on_train_begin(trainer.args, state, trainer.control)
    return True


def finish_model(model: Any, trainer: Any, hooks: RunHooks, folder: RunFolder) -> None:
    """Clear gradients, switch the model to eval mode, and check that its weights are finite.

    Raises:
        GymError: ``INTERRUPTED`` if the run was stopped; ``DATA_INVALID`` for weights that are not finite.
    """
    model.zero_grad(set_to_none=True)
    model.eval()
    steps = int(trainer.state.global_step)
    require_finite(model, steps)
    if hooks.stopped:
        reason = (
            f"stopped at step {steps} of {trainer.state.max_steps}; a checkpoint is in {folder.checkpoints}"
        )
        raise GymError(ErrorCode.INTERRUPTED, reason, f"resume with: gym train {folder.path / 'config.yaml'}")


def make_result(
    config: TrainingConfig,
    trainer: Any,
    hooks: RunHooks,
    rows: RunRows,
    model: Any,
    tokenizer: Any,
    folder: RunFolder,
    best_step: int | None,
) -> TrainResult:
    """Create the result of ``Trainer.train``."""
    steps = int(trainer.state.global_step)
    plan = getattr(trainer, "plan", None)  # only private runs have a plan
    last = hooks.losses[-(config.logging_steps or MAX_INTERVAL) :]
    return TrainResult(
        steps=steps,
        final_loss=sum(last) / len(last),
        losses=hooks.losses,
        history=trainer.state.log_history,
        output_dir=folder.path,
        num_examples=rows.counts.learned,
        rows=rows.counts,
        num_tokens=hooks.num_tokens,
        num_processes=processes.count(),
        model=model,
        tokenizer=tokenizer,
        best_step=best_step,
        epsilon=plan.epsilon(steps) if plan is not None else None,
        privacy=plan,
    )


def save_result(
    config: TrainingConfig,
    trainer: Any,
    algorithm: Algorithm,
    hooks: RunHooks,
    folder: RunFolder,
    result: TrainResult,
    check: LearningCheck | None,
) -> TrainResult:
    """Save the model, run the learning check, and complete the run's record. Return the result with the check.

    The weights are written first, so that they are kept if the check fails.
    """
    stop_watching()  # from here on, the result is written even if another machine is lost
    with quiet_loading():
        save_final(trainer, result.model, result.tokenizer, algorithm, config, folder.path)
    if config.save_delta is not None:
        processes.on_main(lambda: _save_delta(config, result, folder))
    done = with_check(result, check)
    processes.on_main(lambda: folder.finish(done.summary()))
    assert hooks.experiment is not None  # it was set when training began
    hooks.experiment.log_artifacts(folder.artifacts())
    return done


def with_check(result: TrainResult, check: LearningCheck | None) -> TrainResult:
    """Add the measurements of the learning check to ``result``; return it unchanged if there is no check."""
    if check is None:
        return result
    return replace(result, check=check.result(result.model, result.history, result.best_step))


def _save_delta(config: TrainingConfig, result: TrainResult, folder: RunFolder) -> None:
    """Write the fine-tuned model as a delta of its base, replacing the file of an earlier attempt."""
    from gym_fed.training.run.afterwards import export

    path = folder.path / DELTA_NAME
    path.unlink(missing_ok=True)
    export(result.model, result.tokenizer, config, path, "delta", config.save_delta)
