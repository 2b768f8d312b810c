"""Opens one source of rows as a config names it: files, tasks, the catalogue, the hub, or LLaMA-Factory's list."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from gym_fed.config.train.data_source import DataConfig
from gym_fed.data.columns import renaming
from gym_fed.data.reading import PlacedRow, converted, iter_rows


def source_rows(source: DataConfig) -> Iterator[PlacedRow]:
    """Rows of ``source`` with their places, read as they are consumed; weight and role are the caller's to apply.

    Raises:
        GymError: See ``load_rows``, ``hub_rows``, ``catalogue_rows``, ``dataset_rows`` and ``generate``.
    """
    return islice(_rows(source), source.num_examples)


def _rows(source: DataConfig) -> Iterator[PlacedRow]:
    rename = renaming(source.columns)
    if source.path is not None:
        yield from iter_rows(source.path, source.format, rename=rename)
    elif source.hub is not None:
        from gym_fed.data.hub import hub_rows

        raw = hub_rows(source.hub, subset=source.subset, split=source.split)
        yield from converted(raw, source.format, rename)
    elif source.name is not None:
        from gym_fed.data.catalogue import catalogue_rows

        yield from catalogue_rows(source.name, split=source.split)
    elif source.dataset is not None and source.dataset_info is not None:
        from gym_fed.data.dataset_info import dataset_rows

        yield from dataset_rows(source.dataset, source.dataset_info, seed=source.seed)
    else:
        from gym_fed.data.generated import generate_mix

        tasks, count = source.tasks or [], source.num_examples or 0
        rows = generate_mix(tasks, count, seed=source.seed, max_turns=source.max_turns)
        yield from ((f"tasks {', '.join(tasks)}: row {number}", row) for number, row in enumerate(rows, 1))
