"""What an algorithm is: which rows it learns from, how it encodes them, and which TRL trainer it builds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from gym_fed.config.training import TrainingConfig
from gym_fed.data.rows import Row, RowKind
from gym_fed.training.job import Job


class Algorithm(ABC):
    """One way to train. Stateless: everything it needs is handed in."""

    row_kind: ClassVar[RowKind] = "supervised"
    """What the rows handed to ``encode`` are; see ``gym_fed.data.rows``. Other rows are converted or refused before."""

    task_type: ClassVar[str] = "CAUSAL_LM"
    """PEFT's name of what the model does."""

    needs_graders: ClassVar[bool] = False
    """Whether answers are rewarded by graders; without any the run is refused."""

    def loss_measures_rows(self, config: TrainingConfig) -> bool:
        """Whether the loss of a step says how well its rows are known, so that a jump of it is those rows' doing.

        Not where the model's own answers are learnt from, nor where a loss shall rise.
        """
        return True

    def check(self, config: TrainingConfig) -> None:  # noqa: B027 - most algorithms refuse nothing
        """Refuse a config that this algorithm cannot honour, before anything is loaded or written.

        Raises:
            GymError: ``CONFIG_INVALID`` naming the key and the remedy.
        """

    @abstractmethod
    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[dict[str, Any]]:
        """Rows to the columns that the trainer takes; their digest decides whether a run may resume.

        Where a row may be dropped or cut, the list is an ``EncodedRows``, whose ``counts`` say what became of each.

        Raises:
            GymError: ``DATA_INVALID`` for rows this algorithm cannot learn from.
        """

    def adapt(self, model: Any, tokenizer: Any, config: TrainingConfig) -> Any:
        """The model that is tuned, made of the causal LM that was loaded: itself, or one with another head on it.

        Called before the tuning method prepares the model; what is returned is the result's model, too.
        """
        return model

    @abstractmethod
    def build(self, job: Job) -> Any:
        """The ``transformers.Trainer`` that will run: a TRL trainer made by ``trl_glue.local``."""

    def save(self, trainer: Any, folder: Path) -> None:  # noqa: B027 - most have nothing beside the model
        """Write what belongs to the result beside the model (a critic, a head) into ``folder``."""
