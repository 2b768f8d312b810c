"""Rows of the datasets in the catalogue (``gym_fed.config.train.catalogue``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gym_fed.config.train.catalogue import CatalogueEntry, catalogue_entry
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.formats.base import BadRow, Raw, as_object
from gym_fed.data.hub import hub_rows
from gym_fed.data.reading import PlacedRow, converted

_MAY_LACK = ("input", "system", "tools", "images")


def catalogue_rows(name: str, *, split: str | None = None) -> Iterator[PlacedRow]:
    """Yield the rows of a dataset in the catalogue.

    Args:
        name: In the catalogue.
        split: Instead of the entry's own.

    Raises:
        GymError: ``NOT_FOUND``; ``USAGE`` for a set that is not on the hub, whose images are not in it, or whose
            split has to be named; see ``hub_rows`` for the others.
    """
    entry = catalogue_entry(name)
    if entry.hub is None:
        raise GymError(
            ErrorCode.USAGE,
            f"data set {name!r} lies in LLaMA-Factory's repository, not on the hub",
            "clone github.com/hiyouga/LLaMA-Factory and write "
            f"data: [{{dataset: {name}, dataset_info: LLaMA-Factory/data}}]",
        )
    if entry.pictures is not None:
        raise GymError(
            ErrorCode.USAGE,
            f"data set {name!r} names pictures that are no part of it: {entry.pictures}",
            f"put them next to the dataset's file (hf download --repo-type dataset {entry.hub}) and set path to it",
        )
    chosen_split = split or entry.split
    if chosen_split is None:
        raise GymError(ErrorCode.USAGE, f"data set {name!r} has no split of its own", "name one with split")
    subsets: list[str | None] = [*entry.subsets] or [entry.subset]
    for subset in subsets:
        raw = hub_rows(entry.hub, subset=subset, split=chosen_split, folder=entry.folder, files=entry.files)
        yield from rows_of_entry(entry, raw)


def rows_of_entry(entry: CatalogueEntry, raw: Iterator[tuple[str, Any]]) -> Iterator[PlacedRow]:
    """Convert raw rows with the columns of ``entry`` to rows of ``gym_fed.data.rows``."""
    columns = entry.read_columns

    def rename(value: Any) -> Raw:
        row = as_object(value)
        missing = [theirs for ours, theirs in columns.items() if theirs not in row and ours not in _MAY_LACK]
        if missing:
            raise BadRow(f"has no column {missing[0]!r}", "the set has changed; name its columns with hub")
        renamed = {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
        if entry.speakers and isinstance(turns := renamed.get("conversations"), list):
            renamed["conversations"] = [_spoken(turn, entry.speakers) for turn in turns]
        return renamed

    return converted(raw, entry.format, rename)


def _spoken(turn: Any, speakers: dict[str, str]) -> Any:
    if not isinstance(turn, dict):
        return turn
    speaker = turn.get("from")
    return {**turn, "from": speakers.get(str(speaker), speaker)}
