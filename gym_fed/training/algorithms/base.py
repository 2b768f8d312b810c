"""What an algorithm is: which rows it learns from, how it encodes them, and which TRL trainer it builds.

What is true of an algorithm stands on its class, and nowhere else: configs and checks ask for the fact, never for a
name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel

from gym_fed.config.train.training import TrainingConfig
from gym_fed.data.rows import Row, RowKind
from gym_fed.training.run.job import Job


class Algorithm(ABC):
    """One way to train. Stateless: everything it needs is handed in."""

    row_kind: ClassVar[RowKind] = "supervised"
    """What the rows handed to ``encode`` are; see ``gym_fed.data.rows``. Other rows are converted or refused before."""

    task_type: ClassVar[str] = "CAUSAL_LM"
    """PEFT's name of what the model does."""

    Settings: ClassVar[type[BaseModel] | None] = None
    """What the section of its name holds; None has no section. One of ours is a key of the config
    (``gym_fed/config/algorithms``), which says its type, and needs none here."""

    needs_graders: ClassVar[bool] = False
    """Whether answers are rewarded by graders; without any the run is refused, and for others ``graders`` is."""

    generates: ClassVar[bool] = False
    """Whether every batch is made of whole groups of answers that the trained model writes."""

    uses_reference: ClassVar[bool] = False
    """Whether the loss holds the model against the one at the start, whatever the settings."""

    scores_reference_once: ClassVar[bool] = False
    """Of those with a reference: whether it is always asked before the first step, and never again."""

    forgets: ClassVar[bool] = False
    """Whether rows of ``role: forget`` are unlearned; for the others that role is refused."""

    packs: ClassVar[bool] = False
    """Whether whole rows may share a row of ``max_length`` (``packing: bfd``)."""

    assistant_only_default: ClassVar[bool] = True
    """What ``assistant_only_loss`` is where it is not given: whether prompts are left out of what is learned."""

    packing_default: ClassVar[bool] = False
    """What ``packing`` is where it is not given."""

    per_example: ClassVar[bool] = False
    """Whether the loss is a mean over examples, none of which looks at another, as DP-SGD needs."""

    shards: ClassVar[bool] = False
    """Whether the model's weights may be split over processes; not where it generates, scores or is copied."""

    uses_model_loss: ClassVar[bool] = False
    """Whether what is learned from is the loss that the model itself gives."""

    reads_images: ClassVar[bool] = False
    """Whether models that read images are trained with their pictures."""

    federates: ClassVar[bool] = False
    """Whether a hub may ask for it: it needs nothing but the contributor's own rows."""

    of_few_rows: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Settings of its section that suit a few dozen rows of one person, where they are not given."""

    tried: ClassVar[str] = ""
    """What the tests run it with, on a CPU and tiny models; docs/support.md is made of it."""

    untried: ClassVar[str] = ""
    """What goes with it and was never run."""

    @classmethod
    def writes_answers(cls, config: TrainingConfig) -> bool:
        """Whether the model that is trained writes answers that it learns from."""
        return cls.generates

    @classmethod
    def least_batch(cls, settings: Any) -> int:
        """How many rows a batch holds at least, with its section as it is."""
        return 1

    @classmethod
    def advice(cls, folder: str) -> str:
        """What the trained model in ``folder`` is good for, for whoever trained it."""
        return f"try it with: gym chat {folder}"

    def settings(self, config: TrainingConfig) -> Any:
        """The section of this algorithm, of the type that the config says or ``Settings`` names."""
        return config.chosen_sections()[config.algorithm]

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
