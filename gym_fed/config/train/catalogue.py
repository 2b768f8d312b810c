"""The catalogue of Hugging Face datasets under their common names: ``data: [{name: gsm8k}]``.

The entries are in ``assets/catalogue.yaml``. Uncertain properties of a dataset are omitted and shown as not stated;
licences are never guessed.
"""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, model_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError

FILE = Path(__file__).parents[2] / "assets" / "catalogue.yaml"
_OWN_NAMES = {
    "alpaca": ("instruction", "input", "output"),
    "sharegpt": ("conversations",),
    "messages": ("messages",),
    "text": ("text",),
}


class CatalogueEntry(StrictModel):
    """A dataset of the catalogue."""

    hub: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+$")
    """Repository on the Hugging Face Hub, ``owner/name``."""

    llamafactory: str | None = None
    """File in ``data/`` of LLaMA-Factory's repository, instead of ``hub``."""

    subset: str | None = None
    """Configuration on the Hub."""

    subsets: list[str] = Field(default_factory=list)
    """Several configurations, read one after the other."""

    split: str | None = "train"
    """Default split; None if a split must be given."""

    folder: str | None = None
    """Folder of the repository; no files outside it are read."""

    files: list[str] = Field(default_factory=list)
    """Files of the repository to read; by default all."""

    format: Literal["alpaca", "sharegpt", "messages", "preference", "kto", "text"]
    """Format of the rows, a name in ``gym_fed.core.registries.FORMATS``."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Dataset columns by the format's column names; by default, the two are the same."""

    speakers: dict[str, str] = Field(default_factory=dict)
    """Role names unknown to the format, mapped to known roles."""

    licence: str | None = None
    """SPDX identifier of the licence in the dataset card; None if uncertain."""

    rows: int | None = None
    """Number of rows of the split; None if uncertain."""

    bytes: int | None = None
    """Bytes of the split's unpacked texts, or of the file; None if uncertain."""

    pictures: str | None = None
    """Source of the images that rows refer to, if not included in the dataset."""

    about: str
    """A short description."""

    also: list[str] = Field(default_factory=list)
    """Further names of the dataset."""

    @model_validator(mode="after")
    def _validate_place(self) -> CatalogueEntry:
        if (self.hub is None) == (self.llamafactory is None):
            raise ValueError("give either hub or llamafactory")
        if self.format in ("preference", "kto") and not self.columns:
            raise ValueError(f"{self.format} needs columns")
        return self

    @property
    def read_columns(self) -> dict[str, str]:
        """The dataset columns to read, by the format's column names."""
        return self.columns or {name: name for name in _OWN_NAMES[self.format]}

    @property
    def place(self) -> str:
        """The location of the dataset, for display."""
        return self.hub or f"LLaMA-Factory's data/{self.llamafactory}"


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """Return all entries by name, in file order."""
    values = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {str(name): CatalogueEntry.model_validate(value) for name, value in values.items()}


def catalogue_entry(name: str) -> CatalogueEntry:
    """Return the entry with this name or alias.

    Raises:
        GymError: ``NOT_FOUND`` with similar names.
    """
    entries = catalogue()
    by_name = entries | {other: entry for entry in entries.values() for other in entry.also}
    if name not in by_name:
        close = difflib.get_close_matches(name, by_name, n=3) or list(entries)[:8]
        reason = f"the catalogue has no dataset {name!r}"
        remedy = f"use another name, such as {', '.join(close)}; `gym data catalogue` lists all"
        raise GymError(ErrorCode.NOT_FOUND, reason, remedy)
    return by_name[name]
