"""Settings of a run's rows: the ``data`` list, truncation, packing and labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.member import MemberOf
from gym_fed.core.registries import FORMATS, TASKS

DataFormat = Annotated[str, MemberOf(FORMATS, ("auto",))]
_ONLY_WITH = {
    "format": ("path", "hub"),
    "columns": ("path", "hub"),
    "roles_to_train": ("path", "hub"),
    "train_on_eos": ("path", "hub"),
    "subset": ("hub",),
    "split": ("hub", "name"),
    "dataset_info": ("dataset",),
    "max_turns": ("tasks",),
}


class DataConfig(StrictModel):
    """A source of rows: exactly one of ``path``, ``tasks``, ``name``, ``hub`` or ``dataset``."""

    path: (
        Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)] | None
    ) = None
    """File (.json, .jsonl, .csv, .tsv, .parquet, .tar, .txt, or any of these with .gz), folder of such files, pattern
    such as ``data/*.jsonl``, or fsspec URL of any of these. Relative paths start from the working directory."""

    tasks: list[Annotated[str, MemberOf(TASKS)]] | None = None
    """Names of generated tasks (`gym data tasks` lists them), mixed in equal shares."""

    name: str | None = None
    """Name of a dataset in the catalogue, such as ``gsm8k`` (`gym data catalogue` lists them)."""

    hub: str | None = Field(default=None, pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """Dataset of the Hugging Face Hub, ``owner/name``: from the local cache, or else streamed from the network."""

    dataset: str | None = Field(default=None, min_length=1)
    """Name of a dataset in ``dataset_info``."""

    dataset_info: Path | None = None
    """LLaMA-Factory's ``dataset_info.json``, or its folder; needed with ``dataset``."""

    subset: str | None = None
    """For ``hub``: the configuration of the dataset."""

    split: str | None = None
    """For ``hub`` and ``name``: the split; by default ``train``, or the catalogue's."""

    format: DataFormat = "auto"
    """Layout of a file's rows; ``auto`` detects it from the first row."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Names of columns in the files, by the name that the format expects: ``{prompt: question}``; keys of messages are
    ``{messages.role: speaker, messages.content: said}``."""

    roles_to_train: list[Literal["system", "user", "assistant", "tool"]] | None = None
    """Roles whose turns are trained on, instead of the assistant's. A turn's own ``weight`` or ``train`` takes
    precedence."""

    train_on_eos: Literal["turn", "all", "last", "none"] = "turn"
    """End tokens to train on: of trained turns, of all turns, of the last trained turn, or none."""

    num_examples: int | None = Field(default=None, ge=1)
    """Number of rows: for tasks, rows to generate; for other sources, the first N rows (by default all)."""

    max_turns: int = Field(default=1, ge=1)
    """For tasks: maximum questions per conversation; above 1, one row in five is such a conversation."""

    weight: float = Field(default=1.0, gt=0)
    """Number of times that the rows of this source are repeated; rows for a fraction are drawn with the seed."""

    seed: int = 0
    """Seed of generated rows, and of the sample that ``num_samples`` in ``dataset_info`` sets."""

    role: Literal["learn", "forget"] = "learn"
    """``forget`` marks rows that ``gradient_difference`` and ``npo`` unlearn."""

    @model_validator(mode="after")
    def _validate_source(self) -> DataConfig:
        given = [key for key in ("path", "tasks", "name", "hub", "dataset") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError("give one of path, tasks, name, hub and dataset")
        for key, sources in _ONLY_WITH.items():
            if getattr(self, key) not in (None, "auto", "turn", 1, {}) and given[0] not in sources:
                raise ValueError(f"{key} is for {' and '.join(sources)}, not for {given[0]}")
        if self.name is not None:
            _require_in_catalogue(self.name)
        if self.tasks is not None and not self.tasks:
            raise ValueError("tasks is empty")
        if self.tasks is not None and self.num_examples is None:
            raise ValueError("tasks need num_examples")
        if self.dataset is not None and self.dataset_info is None:
            raise ValueError("dataset needs dataset_info, the path of a dataset_info.json")
        return self


def _require_in_catalogue(name: str) -> None:
    from gym_fed.config.train.catalogue import catalogue_entry
    from gym_fed.core.errors import GymError

    try:
        catalogue_entry(name)
    except GymError as error:
        raise ValueError(f"{error.message}; {error.hint}") from error


class DataSections(StrictModel):
    """Top-level keys of the YAML file."""

    data: list[DataConfig] = Field(default_factory=list)
    """The training rows. May be empty only if rows are passed to ``Trainer.train``."""

    eval_data: list[DataConfig] = Field(default_factory=list)
    """Held-out rows, never trained on; their loss is measured every ``eval_steps``."""

    group_by_length: bool = False
    """Batch rows of similar length together: less padding, and a slightly less random order."""

    shuffle: bool = True
    """Shuffle the rows of every epoch; false preserves the order of ``data``."""

    max_length: int = Field(default=256, ge=2)
    """Maximum length of a row in tokens. Longer rows are truncated (sft), or continued in the next row (packing)."""

    eval_split: float = Field(default=0.0, ge=0)
    """Number (below 1: fraction) of rows of ``data`` to hold out instead of ``eval_data``, drawn with ``seed``."""

    tokenized_path: str | None = Field(default=None, min_length=1)
    """Folder of encoded rows. A run writes its rows into an empty folder; later runs with the same tokenizer and keys
    read them and need no ``data``."""

    preprocess_only: bool = False
    """Encode the rows into ``tokenized_path`` and stop: no model is loaded, and nothing is trained."""

    streaming: bool = False
    """Read, shuffle and encode the rows of ``data`` while training, instead of storing them first: no copy on disk,
    and training starts immediately. Needs ``max_steps``; rows are shuffled in blocks of ``buffer_size``."""

    buffer_size: int = Field(default=16384, ge=1)
    """With ``streaming``: number of rows that are held in memory and shuffled together."""

    packing: bool | Literal["bfd"] | None = None
    """Concatenate rows and cut them into rows of ``max_length``. Default: on for ``pretrain``, off for ``sft``. ``bfd``
    (best fit, decreasing) packs unsplit rows into rows of ``max_length``; they do not attend to each other."""

    assistant_only_loss: bool | None = None
    """Train only on the assistant's messages of conversations. Default: on for ``sft``, off for ``pretrain``."""

    train_on_prompt: bool = False
    """Train on the prompts too; the same as ``assistant_only_loss: false``."""

    mask_history: bool = False
    """Train only on the last answer of a conversation."""

    default_system: str | None = Field(default=None, min_length=1)
    """System message for conversations that have none."""

    reasoning: Literal["learn", "drop", "off"] = "learn"
    """Treatment of ``reasoning_content`` (or ``thinking``) of the assistant's messages.
    ``off`` (``sft`` and ``pretrain``) drops it, and does not train on the empty thought that some templates (Qwen3's)
    write in its place, as in prompts with thinking disabled. With ``learn``, a row whose reasoning the chat
    template cannot show is refused."""

    chat_template: Literal["none"] | Annotated[str, Field(min_length=1)] | None = None
    """Instead of the tokenizer's chat template: the path of a Jinja file, Jinja itself, or a name such as ``chatml``
    (docs/chat-templates.md lists them). ``none`` removes the template: plain-string prompts and answers are then
    trained as bare text, otherwise as chat turns. It is saved with the result."""

    chat_template_tokens: Literal["require", "add"] = "require"
    """Handling of a template that ends an answer with a token that the tokenizer lacks, so that the model would never
    stop: ``require`` refuses the run; ``add`` adds the template's tokens to the tokenizer and rows to the embeddings,
    which start as the mean of the others. Both are saved with the result. ``add`` needs ``finetuning: full``."""

    @model_validator(mode="before")
    @classmethod
    def _resolve_train_on_prompt(cls, values: Any) -> Any:
        is_set = isinstance(values, dict) and values.get("train_on_prompt") is True
        if is_set and values.get("assistant_only_loss") is None:
            return {**values, "assistant_only_loss": False}
        return values

    @model_validator(mode="after")
    def _validate_rows(self) -> DataSections:
        if self.preprocess_only and self.tokenized_path is None:
            raise ValueError("preprocess_only needs tokenized_path, the folder for the encoded rows")
        if self.group_by_length and not self.shuffle:
            raise ValueError("group_by_length determines the order of the rows; remove shuffle: false")
        if self.train_on_prompt and self.assistant_only_loss:
            raise ValueError("train_on_prompt and assistant_only_loss are mutually exclusive")
        if self.mask_history and (self.train_on_prompt or self.assistant_only_loss is False):
            raise ValueError("mask_history trains on the last answer only, but train_on_prompt on everything")
        if self.mask_history and self.packing is True:
            raise ValueError(
                "mask_history and packing: true are mutually exclusive; use packing: bfd, or remove one"
            )
        return self

    @property
    def is_about_turns(self) -> bool:
        """True if a source selects the turns to train on."""
        return any(
            source.roles_to_train is not None or source.train_on_eos != "turn"
            for source in (*self.data, *self.eval_data)
        )

    def _validate_learned_turns(self, learns_all: bool) -> None:
        """Refuse turn settings of sources that a setting of the run would override."""
        for source in (*self.data, *self.eval_data):
            key = "train_on_eos" if source.roles_to_train is None else "roles_to_train"
            given = source.roles_to_train is not None or source.train_on_eos != "turn"
            if given and learns_all:
                raise ValueError(
                    f"data: {key} applies to turns, but this run trains on whole conversations; remove it, or set "
                    "assistant_only_loss: true (and packing: false)"
                )
            if self.mask_history and (source.roles_to_train is not None or source.train_on_eos == "all"):
                raise ValueError(
                    f"data: {key} and mask_history, which trains only on the last answer, are mutually exclusive; "
                    "remove one"
                )
