"""Define the base class of training algorithms: the kind of rows, their encoding, and the TRL trainer.

The properties of an algorithm are class attributes, so that configs and checks never compare algorithm names.
"""

from __future__ import annotations

import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from gym_fed.config.train.training import TrainingConfig
from gym_fed.data.encoding import iter_encoded
from gym_fed.data.row_counts import RowCounts
from gym_fed.data.rows import Row, RowKind
from gym_fed.training.model.output_head import reads_whole_logits
from gym_fed.training.run.job import Job


class Algorithm(ABC):
    """A training algorithm. Instances are stateless."""

    row_kind: ClassVar[RowKind] = "supervised"
    """Kind of rows that ``encode`` accepts; see ``gym_fed.data.rows``. Other rows are converted or refused."""

    learning_rate_scale: ClassVar[float] = 1.0
    """Default learning rate for large pre-trained models, relative to that of supervised fine-tuning."""

    task_type: ClassVar[str] = "CAUSAL_LM"
    """PEFT's name for the task of the model."""

    Settings: ClassVar[type[BaseModel] | None] = None
    """Schema of the algorithm's config section; None if there is no section. Built-in algorithms leave this None, since
    their sections are typed keys of the config (``gym_fed/config/algorithms``)."""

    needs_graders: ClassVar[bool] = False
    """True if a run needs graders, which reward the answers. All other algorithms refuse graders."""

    sequences_per_row: ClassVar[int] = 1
    """Number of sequences per row of a batch, such as two for a pair."""

    generates: ClassVar[bool] = False
    """True if batches consist of whole groups of answers that the trained model generates."""

    uses_reference: ClassVar[bool] = False
    """True if the loss always compares the model with the initial model."""

    scores_reference_once: ClassVar[bool] = False
    """True if the reference scores the rows only once, before the first step."""

    takes_reference: ClassVar[bool] = False
    """True if the config may specify the reference (``reference_model``)."""

    forgets: ClassVar[bool] = False
    """True if rows with ``role: forget`` are unlearned; other algorithms refuse that role."""

    orders_rows: ClassVar[bool] = False
    """True if the algorithm determines the order of rows, so that ``shuffle: false`` is refused."""

    streams: ClassVar[bool] = False
    """True if rows may be encoded during training (``streaming``)."""

    keeps_encoded: ClassVar[bool] = True
    """True if later runs may reuse encoded rows (``tokenized_path``), which must not depend on a second model."""

    packs: ClassVar[bool] = False
    """True if ``packing: bfd`` is supported."""

    assistant_only_default: ClassVar[bool] = True
    """The default of ``assistant_only_loss``: True excludes prompts from the loss."""

    packing_default: ClassVar[bool] = False
    """The default of ``packing``."""

    per_example: ClassVar[bool] = False
    """True if the loss is a mean over independent examples, as DP-SGD requires."""

    shards: ClassVar[bool] = False
    """True if the weights may be sharded across processes; False if training copies the model or generates with it."""

    splits_rows: ClassVar[bool] = False
    """True if the tokens of a row may be split across processes."""

    pipelines: ClassVar[bool] = False
    """True if each process may hold consecutive blocks of the model; the loss must call the model once per batch."""

    multiplies_by_head: ClassVar[bool] = True
    """True if the loss uses the weights of the output head directly, so that an adapter on the head would not learn."""

    uses_model_loss: ClassVar[bool] = False
    """True if the loss is computed by the model itself."""

    reads_images: ClassVar[bool] = False
    """True if the algorithm can train models that read images on images."""

    federates: ClassVar[bool] = False
    """True if a hub may request the algorithm, because it needs only the contributor's own rows."""

    of_few_rows: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Defaults of the config section for small datasets (a few dozen rows)."""

    tried: ClassVar[str] = ""
    """Combinations that the tests run, on a CPU and with tiny models; `gym docs members` shows them."""

    untried: ClassVar[str] = ""
    """Supported combinations without tests."""

    @classmethod
    def writes_answers(cls, config: TrainingConfig) -> bool:
        """Return True if the model learns from answers that it generates."""
        return cls.generates

    @classmethod
    def logits(cls, config: TrainingConfig) -> Literal["tiled", "whole", "none"]:
        """Return how the loss uses the logits of a batch: in tiles, all at once, or not at all.

        Tiles are recomputed in the backward pass (TRL's ``fused_lm_head``). Only some architectures support them; a
        model that is not on this machine is assumed to support them.
        """
        return "whole" if reads_whole_logits(config) else "tiled"

    def packing(self, config: TrainingConfig) -> bool | Literal["bfd"]:
        """Return the effective value of ``packing``."""
        return config.packing or False

    @classmethod
    def beside(cls, config: TrainingConfig, *, adapted: bool) -> tuple[int, int]:
        """Return the number of frozen and of trained model copies, in addition to the trained model.

        Args:
            config: The run's config.
            adapted: True if an adapter is trained; the model with its adapter disabled then serves as the reference.
        """
        section = config.chosen_sections().get(config.algorithm)
        # None, the default, means that the log-probabilities are precomputed.
        scored_before = getattr(section, "precompute_ref_log_probs", False) is not False
        beside = cls.uses_reference and not (adapted or cls.scores_reference_once or scored_before)
        return (int(beside), 0)

    @classmethod
    def models_beside(cls, config: TrainingConfig) -> tuple[str, ...]:
        """Return the names of other frozen models that are loaded, such as a teacher."""
        teacher = getattr(config.chosen_sections().get(config.algorithm), "teacher", None)
        return () if teacher is None else (teacher,)

    @classmethod
    def least_batch(cls, settings: Any) -> int:
        """Return the minimum number of rows per batch under these settings."""
        return 1

    @classmethod
    def advice(cls, folder: str) -> str:
        """Return the next command to run on the trained model in ``folder``, or a description of its use."""
        return shlex.join(("gym", "chat", folder))

    def settings(self, config: TrainingConfig) -> Any:
        """Return this algorithm's section of the config."""
        return config.chosen_sections()[config.algorithm]

    def loss_measures_rows(self, config: TrainingConfig) -> bool:
        """Return True if a step's loss measures how well the model fits its rows, so that a spike indicates bad rows.

        False if the model learns from its own answers, or if the loss is supposed to rise.
        """
        return True

    def check(self, config: TrainingConfig) -> None:  # noqa: B027 - most algorithms refuse nothing
        """Refuse a config that this algorithm does not support, before anything is loaded or written.

        Raises:
            GymError: ``CONFIG_INVALID`` with the key and the remedy.
        """

    def lengths(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[int]:
        """Return the number of tokens of each row before truncation; the default is for supervised rows.

        Raises:
            GymError: See ``encode``.
        """
        encoded = iter_encoded(tokenizer, rows, max_length=sys.maxsize, reasoning=config.reasoning)
        return [len(row["input_ids"]) for row in encoded]

    def encode_each(
        self, config: TrainingConfig, tokenizer: Any, rows: Iterable[Row], counts: RowCounts
    ) -> Iterator[dict[str, Any]] | None:
        """Return an iterator that encodes rows like ``encode``, but holds only a few of them in memory at a time.

        Return None if rows are not encoded one by one, or not to token ids alone. ``counts`` is updated while
        iterating.
        """
        return None

    @abstractmethod
    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[dict[str, Any]]:
        """Encode rows to the columns that the trainer expects.

        If rows may be dropped or truncated, the list is an ``EncodedRows``, whose ``counts`` contain their numbers.

        Raises:
            GymError: ``DATA_INVALID`` for rows that this algorithm cannot learn from.
        """

    def adapt(self, model: Any, tokenizer: Any, config: TrainingConfig) -> Any:
        """Return the model to tune, which the result will contain: the causal LM, or its body with another head.

        Called before the tuning method prepares the model.
        """
        return model

    @abstractmethod
    def build(self, job: Job) -> Any:
        """Build the ``transformers.Trainer`` of the run, from a TRL trainer wrapped with ``trl_glue.local``."""

    def save(self, trainer: Any, folder: Path) -> None:  # noqa: B027 - most have no other parts
        """Write the parts of the result that are not in the model, such as a critic or a head, to ``folder``."""
