"""The inputs of a data pipeline: rows, a key that changes with their content, and weighted interleaving."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import copy_hashed
from gym_fed.data.files import DataFile, find_files
from gym_fed.data.reading import PlacedRow
from gym_fed.data.sources import source_rows
from gym_fed.data.steps import row_digest

Row = dict[str, Any]


@dataclass(frozen=True)
class Input:
    """A source of a pipeline."""

    source: DataConfig | tuple[Row, ...]
    weight: float

    @property
    def name(self) -> str:
        if not isinstance(self.source, DataConfig):
            return "rows in memory"
        source = self.source
        return str(
            source.path or source.name or source.hub or source.dataset or ", ".join(source.tasks or [])
        )

    def rows(self) -> Iterator[PlacedRow]:
        """Yield the rows, starting from the first one."""
        if isinstance(self.source, DataConfig):
            return source_rows(self.source)
        return ((f"row {number}", row) for number, row in enumerate(self.source, 1))

    def key(self) -> Any:
        """Return JSON that changes when the rows change.

        Raises:
            GymError: ``USAGE`` for a Hub dataset, since the content of a stream is not known in advance.
        """
        if not isinstance(self.source, DataConfig):
            digest = hashlib.sha256(b"".join(row_digest(row) for row in self.source))
            return digest.hexdigest()
        config = self.source.model_dump(mode="json", exclude={"weight", "role"})
        if self.source.tasks is not None:
            from gym_fed.version import __version__

            return [config, __version__]
        if self.source.hub is not None or self.source.name is not None:
            raise GymError(
                ErrorCode.USAGE,
                f"hub dataset {self.name} cannot be cached",
                "download it and use its files",
            )
        if self.source.path is not None:
            return [config, [_mark(file) for file in find_files(self.source.path)]]
        return [config, self._dataset_marks()]

    def _dataset_marks(self) -> Any:
        from gym_fed.data.dataset_info import read_dataset_info

        assert isinstance(self.source, DataConfig)
        assert self.source.dataset_info is not None
        info = self.source.dataset_info
        entry = read_dataset_info(info).get(str(self.source.dataset))
        if entry is None or entry.hf_hub_url is not None:
            raise GymError(
                ErrorCode.USAGE, f"dataset {self.name} cannot be cached", "download it and use its files"
            )
        base = info if info.is_dir() else info.parent
        place = entry.cloud_file_name or base / (entry.file_name or "")
        return [entry.model_dump(mode="json"), [_mark(file) for file in find_files(place)]]


def as_input(source: Any) -> Input:
    """Parse an input: a path, config or list of rows, alone or in a pair with its weight.

    Raises:
        GymError: ``USAGE`` for anything else.
    """
    weight = None
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], int | float):
        source, weight = source
    if isinstance(source, str | Path):
        return Input(DataConfig(path=str(source)), 1.0 if weight is None else float(weight))
    if isinstance(source, DataConfig):
        if weight is not None and source.weight != 1.0:
            raise GymError(ErrorCode.USAGE, f"{source.path} has two weights", "set only one")
        if source.role != "learn":
            raise GymError(ErrorCode.USAGE, "a pipeline cannot mark rows to forget", "use data in a config")
        return Input(source, source.weight if weight is None else float(weight))
    if isinstance(source, Sequence) and all(isinstance(row, dict) for row in source):
        return Input(tuple(source), 1.0 if weight is None else float(weight))
    raise GymError(
        ErrorCode.USAGE,
        f"a source has the type {type(source).__name__}",
        "pass a path, a DataConfig or a list of rows, or a pair of one of these and its weight",
    )


def _mark(file: DataFile) -> Any:
    """Return a file's name and sha256, or a remote file's version stamp if it changes with the content."""
    stamp = file.stamp()
    if file.folder is None and len(stamp) > 2:
        return stamp
    with file.open() as stream:
        return [file.name, copy_hashed(stream)[0]]


T = TypeVar("T")
Stopping = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]
STOPPING = get_args(Stopping)


def interleave(
    sources: Sequence[Callable[[], Iterator[T]]],
    weights: Sequence[float],
    seed: int,
    stopping: Stopping = "first_exhausted",
    on_stop: Callable[[int], None] | None = None,
) -> Iterator[T]:
    """Interleave sources at random: the next row comes from source i with probability ``weights[i] / sum(weights)``.

    Args:
        sources: Functions that start a source from its first row.
        weights: One positive weight per source.
        stopping: When to stop, named as in ``datasets.interleave_datasets``. ``first_exhausted``: when the first source
            ends, so that the proportions hold until the end. ``all_exhausted``: when every source has ended at least
            once; a source that ends earlier restarts, so its rows repeat. ``all_exhausted_without_replacement``: when
            every row has been yielded exactly once.
        on_stop: Called with the index of the source that ended, for ``first_exhausted`` with more than one source.
    """
    rng = random.Random(seed)
    streams = [start() for start in sources]
    open_sources = list(range(len(streams)))
    ended: set[int] = set()
    while open_sources:
        if len(open_sources) == 1:
            index = open_sources[0]
        else:
            (index,) = rng.choices(open_sources, [weights[i] for i in open_sources])
        try:
            row = next(streams[index])
        except StopIteration:
            ended.add(index)
            if stopping == "first_exhausted" or len(ended) == len(streams):
                if len(ended) < len(streams) and on_stop is not None:
                    on_stop(index)
                return
            if stopping == "all_exhausted_without_replacement":
                open_sources.remove(index)
                continue
            streams[index] = sources[index]()
            row_or_none = next(streams[index], None)
            if row_or_none is None:  # the source is empty
                open_sources.remove(index)
                continue
            row = row_or_none
        yield row
