"""The base class of training algorithms: their rows, how rows are encoded, and the TRL trainer that they build.

The facts about an algorithm are attributes of its class. Configs and checks read the attribute, never compare the name.
"""

from __future__ import annotations

import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from gym_fed.config.train.training import TrainingConfig
from gym_fed.data.encoding import iter_encoded
from gym_fed.data.rows import Row, RowKind
from gym_fed.training.model.output_head import reads_whole_logits
from gym_fed.training.run.job import Job


class Algorithm(ABC):
    """A training algorithm. It has no state: its methods receive everything they need."""

    row_kind: ClassVar[RowKind] = "supervised"
    """Kind of the rows for ``encode``; see ``gym_fed.data.rows``. Other rows are converted or refused before."""

    learning_rate_scale: ClassVar[float] = 1.0
    """Default learning rate for large pre-trained models, relative to supervised fine-tuning by the same method."""

    task_type: ClassVar[str] = "CAUSAL_LM"
    """PEFT's name of what the model does."""

    Settings: ClassVar[type[BaseModel] | None] = None
    """Schema of the section with its name; None has no section. One of ours is a key of the config
    (``gym_fed/config/algorithms``), which names its type, and needs none here."""

    needs_graders: ClassVar[bool] = False
    """True if answers are rewarded by graders; without any the run is refused, and for others ``graders`` is."""

    sequences_per_row: ClassVar[int] = 1
    """Sequences that the model reads for one row of a batch: two of a pair."""

    generates: ClassVar[bool] = False
    """True if every batch is made of whole groups of answers that the trained model writes."""

    uses_reference: ClassVar[bool] = False
    """True if the loss compares the model with the initial one under all settings."""

    scores_reference_once: ClassVar[bool] = False
    """For algorithms with a reference: whether it scores the rows only once, before the first step."""

    takes_reference: ClassVar[bool] = False
    """True if the config may name the model that the policy is compared with (``reference_model``)."""

    forgets: ClassVar[bool] = False
    """True if rows of ``role: forget`` are unlearned; for the others that role is refused."""

    orders_rows: ClassVar[bool] = False
    """True if it decides which rows follow each other, so that ``shuffle: false`` is refused."""

    keeps_encoded: ClassVar[bool] = True
    """True if a later run may read encoded rows (``tokenized_path``): tokens that depend on no second model."""

    packs: ClassVar[bool] = False
    """True if whole rows may share a row of ``max_length`` (``packing: bfd``)."""

    assistant_only_default: ClassVar[bool] = True
    """The default of ``assistant_only_loss``: whether prompts are left out of what is learned."""

    packing_default: ClassVar[bool] = False
    """The default of ``packing``."""

    per_example: ClassVar[bool] = False
    """True if the loss is a mean over independent examples, as DP-SGD needs."""

    shards: ClassVar[bool] = False
    """True if the model's weights may be split over processes; not where it generates, scores or is copied."""

    multiplies_by_head: ClassVar[bool] = True
    """True if the loss multiplies by the output head's weights itself: an adapter on the head would not learn."""

    uses_model_loss: ClassVar[bool] = False
    """True if the loss is the one that the model itself computes."""

    reads_images: ClassVar[bool] = False
    """True if models that read images are trained with images."""

    federates: ClassVar[bool] = False
    """True if a hub may request it: it needs nothing but the contributor's own rows."""

    of_few_rows: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Defaults of its section for a few dozen rows of one person."""

    tried: ClassVar[str] = ""
    """Combinations that the tests run, on a CPU and tiny models; `gym docs members` shows it."""

    untried: ClassVar[str] = ""
    """Supported combinations that no test runs."""

    @classmethod
    def writes_answers(cls, config: TrainingConfig) -> bool:
        """Return True if the trained model generates answers that it learns from."""
        return cls.generates

    @classmethod
    def logits(cls, config: TrainingConfig) -> Literal["tiled", "whole", "none"]:
        """How the loss reads the vocabulary's logits: in tiles that are computed again backwards (TRL's
        ``fused_lm_head``), all of a batch at once, or not at all. The first is for some architectures only; a model
        that is not on this machine counts as one of them."""
        return "whole" if reads_whole_logits(config) else "tiled"

    def packing(self, config: TrainingConfig) -> bool | Literal["bfd"]:
        """Return the effective value of ``packing``."""
        return config.packing or False

    @classmethod
    def beside(cls, config: TrainingConfig, *, adapted: bool) -> tuple[int, int]:
        """Return how many frozen and how many trained copies of the model a run holds besides the trained model.

        Args:
            config: The run's.
            adapted: True if the model is trained by an adapter, which is switched off to be the reference.
        """
        section = config.chosen_sections().get(config.algorithm)
        scored_before = getattr(section, "precompute_ref_log_probs", False) is not False  # by default it is
        beside = cls.uses_reference and not (adapted or cls.scores_reference_once or scored_before)
        return (int(beside), 0)

    @classmethod
    def models_beside(cls, config: TrainingConfig) -> tuple[str, ...]:
        """Return the names of further models that are loaded and stay frozen, such as a teacher."""
        teacher = getattr(config.chosen_sections().get(config.algorithm), "teacher", None)
        return () if teacher is None else (teacher,)

    @classmethod
    def least_batch(cls, settings: Any) -> int:
        """Return the least number of rows in a batch under the given section."""
        return 1

    @classmethod
    def advice(cls, folder: str) -> str:
        """Return a line for the user: the next command for the trained model in ``folder``, or how it is used."""
        return shlex.join(("gym", "chat", folder))

    def settings(self, config: TrainingConfig) -> Any:
        """Return the section of this algorithm, of the type in the config or in ``Settings``."""
        return config.chosen_sections()[config.algorithm]

    def loss_measures_rows(self, config: TrainingConfig) -> bool:
        """Return True if the loss of a step measures how well its rows are known, so that they can cause a spike.

        Not where the model learns from its own answers, nor where a loss is meant to rise.
        """
        return True

    def check(self, config: TrainingConfig) -> None:  # noqa: B027 - most algorithms refuse nothing
        """Refuse a config that this algorithm cannot honour, before anything is loaded or written.

        Raises:
            GymError: ``CONFIG_INVALID`` naming the key and the remedy.
        """

    def lengths(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[int]:
        """Return the number of tokens of each row, uncut; by default of supervised rows.

        Raises:
            GymError: As ``encode``.
        """
        encoded = iter_encoded(tokenizer, rows, max_length=sys.maxsize, reasoning=config.reasoning)
        return [len(row["input_ids"]) for row in encoded]

    @abstractmethod
    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[dict[str, Any]]:
        """Encode rows to the columns of the trainer; their digest decides whether a run may resume.

        Where a row may be dropped or cut, the list is an ``EncodedRows``, whose ``counts`` hold what became of each.

        Raises:
            GymError: ``DATA_INVALID`` for rows this algorithm cannot learn from.
        """

    def adapt(self, model: Any, tokenizer: Any, config: TrainingConfig) -> Any:
        """Return the model to tune, made from the loaded causal LM: the same, or with another head on its body.

        Called before the tuning method prepares the model. The model returned is the result's model, too.
        """
        return model

    @abstractmethod
    def build(self, job: Job) -> Any:
        """Build the ``transformers.Trainer`` of the run: a TRL trainer made by ``trl_glue.local``."""

    def save(self, trainer: Any, folder: Path) -> None:  # noqa: B027 - most have nothing besides the model
        """Write what belongs to the result besides the model (a critic, a head) into ``folder``."""
