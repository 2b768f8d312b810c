"""Opens one source of rows as a config names it: files, generated tasks, a hub dataset, or a LLaMA-Factory dataset."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from gym_fed.config.data_source import DataConfig
from gym_fed.data.formats.base import BadRow, Raw, as_object
from gym_fed.data.reading import PlacedRow, Rename, converted, iter_rows


def source_rows(source: DataConfig) -> Iterator[PlacedRow]:
    """Rows of ``source`` with their places, read as they are consumed; weight and role are the caller's to apply.

    Raises:
        GymError: See ``load_rows``, ``hub_rows``, ``dataset_rows`` and ``get_task``.
    """
    return islice(_rows(source), source.num_examples)


def _rows(source: DataConfig) -> Iterator[PlacedRow]:
    rename = _renaming(source.columns) if source.columns else None
    if source.path is not None:
        yield from iter_rows(source.path, source.format, rename=rename)
    elif source.hub is not None:
        from gym_fed.data.hub import hub_rows

        raw = hub_rows(source.hub, subset=source.subset, split=source.split)
        yield from converted(raw, source.format, rename)
    elif source.dataset is not None and source.dataset_info is not None:
        from gym_fed.data.dataset_info import dataset_rows

        yield from dataset_rows(source.dataset, source.dataset_info, seed=source.seed)
    else:
        from gym_fed.data.tasks import generate_mix

        tasks, count = source.tasks or [], source.num_examples or 0
        rows = generate_mix(tasks, count, seed=source.seed, max_turns=source.max_turns)
        yield from ((f"tasks {', '.join(tasks)}: row {number}", row) for number, row in enumerate(rows, 1))


def _renaming(columns: dict[str, str]) -> Rename:
    """Columns of a file under the names that formats know."""

    def rename(raw: Any) -> Raw:
        row = as_object(raw)
        missing = [theirs for theirs in columns.values() if theirs not in row]
        if missing:
            raise BadRow(
                f"has no column {missing[0]!r}", "columns names it; give the name of a column that is there"
            )
        rest = {key: value for key, value in row.items() if key not in columns.values()}
        return {**rest, **{ours: row[theirs] for ours, theirs in columns.items()}}

    return rename
