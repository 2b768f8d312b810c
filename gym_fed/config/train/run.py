"""Settings of a run: folder, trackers, checkpoints, evaluation, stopping and rollbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.schema.base import LocalPath, StrictModel
from gym_fed.config.schema.member import MemberOf
from gym_fed.config.train.compute import Dtype
from gym_fed.core.registries import TRACKERS

Cadence = Literal["no", "steps", "epoch"]
"""The frequency of an action in a run; values are those of transformers."""

ALWAYS = ("jsonl", "tensorboard")
"""Trackers that are always on; both write only into the run folder."""


class Reproducibility(StrictModel):
    """Settings that make a run repeatable and record its environment."""

    deterministic: Literal["warn"] | bool = False
    """True makes torch refuse nondeterministic operations; ``warn`` logs them. CPU runs are reproducible without it."""

    cublas_workspace: Literal[":4096:8", ":16:8"] = ":4096:8"
    """Value of ``CUBLAS_WORKSPACE_CONFIG`` with ``deterministic``, unless it is set."""

    record: bool = True
    """Write ``environment.json``: versions, hardware, git commit and digests; a resume reports what has changed."""


class EarlyStopping(StrictModel):
    """Stop when the metric on ``eval_data`` no longer improves (Prechelt 1998)."""

    metric: str = "eval_loss"
    """Name of a metric that evaluation logs."""

    direction: Literal["minimize", "maximize"] = "minimize"
    patience: int = Field(default=3, ge=1)
    """Stop after N consecutive evaluations without improvement."""

    min_delta: float = Field(default=0.0, ge=0)
    """Minimum change that counts as an improvement."""

    restore_best: bool = True
    """Restore the weights of the best evaluation at the end, even if the run is not stopped early."""


class LossSpikes(StrictModel):
    """Roll back to a checkpoint after a loss spike and skip the batches since (PaLM, Chowdhery et al. 2022, 5.1)."""

    factor: float = Field(default=3.0, gt=1)
    """Ratio of a loss to the median of the last ``window`` losses above which it is a spike; NaN is one too."""

    grad_norm_factor: float | None = Field(default=None, gt=1)
    """The same ratio for the gradient norm before clipping; off by default."""

    window: int = Field(default=20, ge=2)
    """Number of losses in the median. Until there are that many, only NaN and infinity are spikes."""

    rollback: bool = True
    """False only records spikes, in ``spikes.json``."""

    max_rollbacks: int = Field(default=3, ge=1)
    """Maximum number of rollbacks; the next spike ends the run with an error."""


class AutoBatchSize(StrictModel):
    """Find the largest ``per_device_train_batch_size`` that fits, by trial; the global batch size is unchanged."""

    memory_share: float = Field(default=0.8, gt=0, le=1)
    """Fraction of the initially free memory that may be used."""

    memory_gib: float | None = Field(default=None, gt=0)
    """GiB in addition to the loaded model's memory, instead of a fraction."""


MAX_INTERVAL = 10
"""Default maximum number of steps between metrics, so that slow runs also report them."""


class RunSections(StrictModel):
    """Top-level keys of the YAML file."""

    output_dir: LocalPath = Path("runs/train")
    """Run folder for config, metrics, checkpoints and result, relative to the working directory."""

    seed: int = 0
    logging_steps: int | None = Field(default=None, ge=1)
    """Steps between metrics; by default a hundredth of the run, at most 10. The first and last step are always
    logged."""

    save_steps: int = Field(default=0, ge=0)
    """Save a checkpoint every N steps; 0 = only when interrupted."""

    save_strategy: Cadence | None = None
    """``epoch`` saves a checkpoint at the end of every epoch. By default ``steps`` if ``save_steps`` is set."""

    save_total_limit: int = Field(default=2, ge=1)
    """Number of checkpoints to keep. With two, damage to the newest costs only the steps since the other."""

    resume_from_checkpoint: bool | str | None = None
    """By default a run resumes from the newest checkpoint in ``output_dir``, if there is one. ``true`` requires one,
    ``false`` refuses an unfinished run. A folder is a checkpoint of another run with the same config and rows."""

    save_final: bool = True
    """Write the trained model (or adapter) into ``output_dir`` at the end."""

    save_dtype: Dtype | None = None
    """dtype of the saved weights; by default the training dtype."""

    save_delta: CodecPolicy | None = None
    """Also write the fine-tune as ``tuned.gymdelta``, a delta of the base in this codec, for a soup or a variant."""

    eval_steps: int = Field(default=0, ge=0)
    """With ``eval_data``: evaluate every N steps; 0 = after every epoch and at the end."""

    eval_strategy: Cadence | None = None
    """Frequency of evaluation; ``no`` disables it. By default ``steps`` with ``eval_steps``, else ``epoch``."""

    evaluate_only: bool = False
    """Evaluate the model on ``eval_data`` and write ``eval_results.json``; nothing is trained."""

    reproducibility: Reproducibility = Field(default_factory=Reproducibility)
    early_stopping: EarlyStopping | None = None
    loss_spikes: LossSpikes | None = None
    auto_batch_size: AutoBatchSize | None = None

    def logging_interval(self, total_steps: int) -> int:
        """Return the steps between metrics in a run of ``total_steps`` steps."""
        return self.logging_steps or min(max(total_steps // 100, 1), MAX_INTERVAL)

    @model_validator(mode="before")
    @classmethod
    def _default_error_feedback(cls, values: Any) -> Any:
        """Turn off error feedback, since there is no later round in which to correct the error."""
        if isinstance(values, dict) and isinstance(policy := values.get("save_delta"), dict):
            return {**values, "save_delta": {"error_feedback": False, **policy}}
        return values

    @model_validator(mode="after")
    def _validate_run(self) -> RunSections:
        if self.save_delta is not None and not self.save_final:
            raise ValueError("save_delta: nothing is written, because save_final is false")
        if self.save_delta is not None and self.save_delta.error_feedback:
            raise ValueError("save_delta.error_feedback: no round follows; set it to false")
        for kind in ("save", "eval"):
            strategy, steps = getattr(self, f"{kind}_strategy"), getattr(self, f"{kind}_steps")
            if strategy == "steps" and not steps:
                raise ValueError(f"{kind}_strategy: steps needs {kind}_steps")
            if strategy in ("no", "epoch") and steps:
                raise ValueError(
                    f"{kind}_steps: {steps} has no effect with {kind}_strategy: {strategy}; remove one"
                )
        if self.early_stopping is not None and self.eval_strategy == "no":
            raise ValueError("early_stopping needs evaluations, and eval_strategy is no")
        if isinstance(self.resume_from_checkpoint, str):
            for key in ("early_stopping", "loss_spikes", "auto_batch_size"):
                if getattr(self, key) is not None:
                    raise ValueError(
                        f"resume_from_checkpoint: {key} keeps more than a checkpoint holds; resume in the run's own "
                        "output_dir instead"
                    )
        spikes = self.loss_spikes
        if spikes is not None and spikes.rollback and not 0 < self.save_steps <= spikes.window:
            raise ValueError(
                f"loss_spikes: a rollback needs a checkpoint; set save_steps between 1 and the window "
                f"of {spikes.window} (it is {self.save_steps}), or rollback: false"
            )
        return self


class TrackerSettings(StrictModel):
    """Settings of a tracking service. Read only when ``tracking`` names one."""

    project: str = "gym-fed"
    name: str | None = None
    """The run's name in the service; by default that of ``output_dir``."""

    tags: list[str] = Field(default_factory=list)
    mode: Literal["offline", "online"] = "offline"
    """``offline`` stores everything in the run folder, for a later ``wandb sync`` or similar command."""

    uri: str | None = None
    """Tracking server for ``mlflow`` with ``mode: online``; ``offline`` always uses a file in the run folder."""


class TrackingSections(StrictModel):
    """Top-level keys of the YAML file."""

    tracking: list[Annotated[str, MemberOf(TRACKERS)]] = Field(
        default_factory=lambda: list(ALWAYS), validate_default=True
    )
    """Trackers of the metrics. ``jsonl`` and ``tensorboard`` are always on; by default nothing leaves this machine."""

    tracker: TrackerSettings = Field(default_factory=TrackerSettings)

    @field_validator("tracking")
    @classmethod
    def _validate_tracking(cls, names: list[str]) -> list[str]:
        return list(dict.fromkeys((*ALWAYS, *names)))
