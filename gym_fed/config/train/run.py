"""Settings of a run: its folder, how often it is saved, logged and evaluated, and when it stops or goes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.schema.base import StrictModel
from gym_fed.config.train.compute import Dtype


class Reproducibility(StrictModel):
    """What makes a run repeatable, and what is written down about where it ran."""

    deterministic: Literal["warn"] | bool = False
    """True: torch refuses operations without a deterministic form; ``warn`` logs them. A CPU run repeats anyway."""

    cublas_workspace: Literal[":4096:8", ":16:8"] = ":4096:8"
    """With ``deterministic``: cuBLAS's workspace, as in its ``CUBLAS_WORKSPACE_CONFIG``, where that is not set."""

    record: bool = True
    """Write ``environment.json``: versions, hardware, git commit and digests; a resume reports what has changed."""


class EarlyStopping(StrictModel):
    """Stop when the figure on ``eval_data`` no longer gets better (Prechelt 1998)."""

    metric: str = "eval_loss"
    """A figure that evaluation logs."""

    direction: Literal["minimize", "maximize"] = "minimize"
    patience: int = Field(default=3, ge=1)
    """So many evaluations in a row without an improvement end the run."""

    min_delta: float = Field(default=0.0, ge=0)
    """A smaller improvement is none."""

    restore_best: bool = True
    """End with the weights of the best evaluation, not of the last step. Also when the run is not stopped early."""


class LossSpikes(StrictModel):
    """Go back to a checkpoint and skip the batches since, when the loss jumps; Chowdhery et al. 2022, 5.1 (PaLM)."""

    factor: float = Field(default=3.0, gt=1)
    """A loss above ``factor`` times the median of the last ``window`` losses is a spike, and so is NaN."""

    grad_norm_factor: float | None = Field(default=None, gt=1)
    """The same rule for the norm of the gradient before clipping; by default it is not looked at."""

    window: int = Field(default=20, ge=2)
    """Losses that are looked back on; nothing is a spike before there are so many (except what is not finite)."""

    rollback: bool = True
    """False only writes spikes down, in ``spikes.json``."""

    max_rollbacks: int = Field(default=3, ge=1)
    """One more spike ends the run with an error."""


class AutoBatchSize(StrictModel):
    """Find the largest ``per_device_train_batch_size`` that fits, by trying; the global batch stays as configured."""

    memory_share: float = Field(default=0.8, gt=0, le=1)
    """How much of the memory that is free at the start may be used."""

    memory_gib: float | None = Field(default=None, gt=0)
    """Instead of a share: so many GiB beyond what the loaded model takes."""


Cadence = Literal["no", "steps", "epoch"]
"""How often something is done in a run; words are transformers'."""


class RunSections(StrictModel):
    """Keys of the YAML's top level."""

    output_dir: Path = Path("runs/train")
    """Where config, metrics, checkpoints and the result go; relative to the working directory."""

    seed: int = 0
    logging_steps: int = Field(default=10, ge=1)
    save_steps: int = Field(default=0, ge=0)
    """A checkpoint every so many steps; 0 saves one only when interrupted."""

    save_strategy: Cadence | None = None
    """``epoch`` saves a checkpoint at the end of every epoch. By default ``steps`` where ``save_steps`` is set."""

    save_total_limit: int = Field(default=2, ge=1)
    """How many checkpoints are kept. With two, a damaged newest one costs no more than the steps since the other."""

    resume_from_checkpoint: bool | str | None = None
    """By default a run goes on from the newest checkpoint in ``output_dir``, where there is one. ``true`` demands one,
    ``false`` refuses an unfinished run. A folder is the checkpoint of another run of the same config and rows."""

    save_final: bool = True
    """Write the trained model (or adapter) into ``output_dir`` at the end."""

    save_dtype: Dtype | None = None
    """Type of the weights on disk at the end; by default the one they were trained in."""

    save_delta: CodecPolicy | None = None
    """At the end, write the fine-tune beside the model as well: ``tuned.gymdelta``, a delta of the base in this codec,
    for a soup or a variant."""

    eval_steps: int = Field(default=0, ge=0)
    """Where there is ``eval_data``: evaluate every so many steps; 0 does so after every epoch and at the end."""

    eval_strategy: Cadence | None = None
    """``no`` leaves ``eval_data`` unused while training. By default ``steps`` with ``eval_steps``, else ``epoch``."""

    evaluate_only: bool = False
    """Train nothing: evaluate the model as it is on ``eval_data``, and write ``eval_results.json``."""

    reproducibility: Reproducibility = Field(default_factory=Reproducibility)
    early_stopping: EarlyStopping | None = None
    loss_spikes: LossSpikes | None = None
    auto_batch_size: AutoBatchSize | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_delta_by_itself(cls, values: Any) -> Any:
        """No round follows to which what the delta loses could be added."""
        if isinstance(values, dict) and isinstance(policy := values.get("save_delta"), dict):
            return {**values, "save_delta": {"error_feedback": False, **policy}}
        return values

    @model_validator(mode="after")
    def _a_delta_of_something(self) -> RunSections:
        if self.save_delta is not None and not self.save_final:
            raise ValueError("save_delta: nothing is written, because save_final is false")
        if self.save_delta is not None and self.save_delta.error_feedback:
            raise ValueError("save_delta.error_feedback: no round follows; set it to false")
        return self

    @model_validator(mode="after")
    def _strategies_and_steps_agree(self) -> RunSections:
        for what in ("save", "eval"):
            strategy, steps = getattr(self, f"{what}_strategy"), getattr(self, f"{what}_steps")
            if strategy == "steps" and not steps:
                raise ValueError(f"{what}_strategy: steps needs {what}_steps")
            if strategy in ("no", "epoch") and steps:
                raise ValueError(
                    f"{what}_steps: {steps} is not read under {what}_strategy: {strategy}; remove one"
                )
        if self.early_stopping is not None and self.eval_strategy == "no":
            raise ValueError("early_stopping: needs evaluations, and eval_strategy is no")
        return self

    @model_validator(mode="after")
    def _a_checkpoint_is_all_there_is(self) -> RunSections:
        if isinstance(self.resume_from_checkpoint, str):
            for key in ("early_stopping", "loss_spikes", "auto_batch_size"):
                if getattr(self, key) is not None:
                    raise ValueError(
                        f"resume_from_checkpoint: {key} keeps more than a checkpoint holds; go on in the run's own "
                        "output_dir instead"
                    )
        return self

    @model_validator(mode="after")
    def _a_checkpoint_before_a_spike(self) -> RunSections:
        spikes = self.loss_spikes
        if spikes is not None and spikes.rollback and not 0 < self.save_steps <= spikes.window:
            raise ValueError(
                f"loss_spikes: to go back there must be a checkpoint; set save_steps between 1 and the window "
                f"of {spikes.window} (it is {self.save_steps}), or rollback: false"
            )
        return self
