"""An endless stream of shuffled rows that can resume from any block without yielding the rows before it.

The files (shards) are shuffled in every epoch, and the rows within every block of ``buffer_size`` rows. The order
depends only on the seed, the epoch and the block number, so a position consists of four numbers.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.data.files import find_files
from gym_fed.data.rows import PlacedDict, Row, RowKind, iter_kind
from gym_fed.data.sources import source_rows


@dataclass(frozen=True)
class StreamPosition:
    """The start of a block.

    Attributes:
        epoch: Number of times that all rows have been read.
        shard: Index in the epoch's order of shards.
        row: Number of rows of the shard before the block.
        block: Number of blocks of the epoch before this one.
    """

    epoch: int = 0
    shard: int = 0
    row: int = 0
    block: int = 0


class RowStream:
    """The rows of several sources.

    Args:
        sources: The sources; an integer ``weight`` is the number of times that an epoch reads a source.
        kind: Kind to which the rows are converted.
        seed: Seed for the order of the files and of the rows.
        buffer_size: Number of rows that are shuffled together.
        shuffle: False to keep the order of the sources.
    """

    def __init__(
        self, sources: Sequence[DataConfig], kind: RowKind, *, seed: int, buffer_size: int, shuffle: bool
    ) -> None:
        self._shards = [shard for source in sources for shard in _shards(source) * int(source.weight)]
        self._kind, self._seed, self._buffer_size, self._shuffle = kind, seed, buffer_size, shuffle

    def digest(self) -> str:
        """Return a digest of the files' names, sizes and modification times, without reading their contents."""
        stamps = [
            [file.stamp(), None if file.folder is None else Path(file.name).stat().st_mtime_ns]
            for shard in self._shards
            if shard.path is not None
            for file in find_files(shard.path)
        ]
        shards = [shard.model_dump(mode="json") for shard in self._shards]
        return hashlib.sha256(json.dumps([shards, stamps], default=str).encode()).hexdigest()

    def sample(self, count: int) -> list[Row]:
        """Return the first rows of the first shard."""
        return list(islice(iter_kind(self._rows(self._shards[0]), self._kind), count))

    def blocks(self, start: StreamPosition) -> Iterator[tuple[StreamPosition, list[Row]]]:
        """Yield blocks and their positions endlessly, beginning at ``start``.

        Raises:
            GymError: Errors of ``source_rows`` and ``as_kind``; ``DATA_INVALID`` if the files have fewer rows now.
        """
        at = start
        while True:
            shards = self._order(at.epoch)
            block, rows = at, list[Row]()
            for index in range(at.shard, len(shards)):
                skipped = at.row if index == at.shard else 0
                source = self._rows(shards[index])
                if sum(1 for _ in islice(source, skipped)) < skipped:
                    raise GymError(
                        ErrorCode.DATA_INVALID,
                        f"{shards[index].path} has fewer rows than the {counted(skipped, 'row')} read before",
                        "restore the file, or start again in another output_dir",
                    )
                for number, row in enumerate(source, skipped + 1):
                    rows.append(row)
                    if len(rows) == self._buffer_size:
                        yield block, self._shuffled(block, rows)
                        block = replace(block, shard=index, row=number, block=block.block + 1)
                        rows = []
                if not rows:
                    block = replace(block, shard=index + 1, row=0)
            if rows:
                yield block, self._shuffled(block, rows)
            at = StreamPosition(epoch=at.epoch + 1)

    def _order(self, epoch: int) -> list[DataConfig]:
        shards = list(self._shards)
        if self._shuffle:
            random.Random(f"shards {self._seed} {epoch}").shuffle(shards)
        return shards

    def _shuffled(self, block: StreamPosition, rows: list[Row]) -> list[Row]:
        if self._shuffle:
            random.Random(f"rows {self._seed} {block.epoch} {block.block}").shuffle(rows)
        return list(iter_kind(rows, self._kind))

    @staticmethod
    def _rows(shard: DataConfig) -> Iterator[Row]:
        for _, row in source_rows(shard):
            yield PlacedDict.like({**row, "forget": True}, row) if shard.role == "forget" else row


def _shards(source: DataConfig) -> list[DataConfig]:
    """Return one source per file; a source without files, or with ``num_examples``, is a single shard."""
    if source.path is None or source.num_examples is not None:
        return [source]
    return [source.model_copy(update={"path": file.name}) for file in find_files(source.path)]
