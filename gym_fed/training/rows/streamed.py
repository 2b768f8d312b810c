"""Encode rows while training (``streaming: true``), and resume at the same row.

A checkpoint stores the position of the current block of rows, and the number of encoded rows before it. A resumed run
reads from there, and skips the encoded rows of the block that were already learned.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import TrainerCallback

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core import console
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.files import write_atomically
from gym_fed.core.registries import ALGORITHMS
from gym_fed.core.text import counted
from gym_fed.data.row_counts import RowCounts
from gym_fed.data.row_stream import RowStream, StreamPosition
from gym_fed.data.rows import Row
from gym_fed.training.algorithms.base import Algorithm

FILE = "stream.json"
_MAX_BLOCKS = 16
"""Number of blocks whose positions are remembered, since batches are prepared ahead of the step that is saved."""

Prepare = Callable[[list[Row], RowCounts], Iterator[Row]]


class StreamedRows:
    """The encoded rows of a stream, as the training data of a trainer.

    Args:
        config: The run's config.
        algorithm: An algorithm that encodes rows one by one.
        tokenizer: The run's tokenizer.
        stream: The rows.
        prepare: Prepares rows for ``Algorithm.encode``, and counts them.

    Attributes:
        counts: Counts of the rows read so far.
    """

    largest: Mapping[str, int] = MappingProxyType({})
    """Always empty: ids are known only when the rows are read, so ``as_dataset`` checks them."""

    def __init__(
        self,
        config: TrainingConfig,
        algorithm: Algorithm,
        tokenizer: Any,
        stream: RowStream,
        prepare: Prepare,
    ) -> None:
        self.counts = RowCounts()
        self._config, self._algorithm, self._tokenizer = config, algorithm, tokenizer
        self._stream, self._prepare = stream, prepare
        self._start, self._number, self._learned = StreamPosition(), 0, 0
        self._begun: Callable[[], None] | None = None
        self._noted = False
        self._blocks: deque[tuple[int, StreamPosition, dict[str, Any]]] = deque(maxlen=_MAX_BLOCKS)
        self._encoded([])  # refuses a model whose rows are not token ids

    def as_dataset(self, num_embeddings: int) -> Any:
        """Return an endless ``datasets.IterableDataset``.

        Args:
            num_embeddings: Number of rows in the model's embeddings; larger token ids are refused.
        """
        from datasets import IterableDataset
        from datasets.iterable_dataset import ExamplesIterable

        return IterableDataset(ExamplesIterable(_Examples(self, num_embeddings), {}))

    def rows(self, num_embeddings: int) -> Iterator[dict[str, Any]]:
        """Yield encoded rows, from the current start position."""
        number, skipped = self._number, self._learned - self._number
        self._blocks.clear()
        if self._begun is not None:
            self._begun()
        for position, rows in self._stream.blocks(self._start):
            self._blocks.append((number, position, self.counts.facts()))
            before = number
            for row in self._encoded(rows):
                number += 1
                if skipped:
                    skipped -= 1
                    continue
                _require_embedded(row, num_embeddings)
                yield row
            if self.counts.notes and not self._noted:
                console.err.print(f"first {counted(len(rows), 'row')}: {'; '.join(self.counts.notes)}")
                self._noted = True
            self.counts.notes.clear()
            self.counts.usual_length = self.counts.length_of_most()
            del self.counts.lengths[:]
            if number == before and not self.counts.learned:
                raise self.counts.nothing_learned(self._config.max_length)

    def state(self, learned: int) -> dict[str, Any]:
        """Return the state after ``learned`` encoded rows, as a JSON-compatible value.

        Raises:
            GymError: ``INTERNAL`` if batches were prepared too far ahead.
        """
        for number, position, counts in reversed(self._blocks):
            if number <= learned:
                return {"position": asdict(position), "number": number, "learned": learned, "counts": counts}
        reason = f"the position after {counted(learned, 'encoded row')} is no longer known"
        raise GymError(ErrorCode.INTERNAL, reason, "raise buffer_size")

    def start(self, state: dict[str, Any] | None, begun: Callable[[], None] | None = None) -> None:
        """Set the state from which the next iteration starts.

        Args:
            state: A result of ``state``; None for the first row.
            begun: Called when the first row is requested.
        """
        vars(self.counts).update(vars(RowCounts(**state["counts"]) if state else RowCounts()))
        self._start = StreamPosition(**state["position"]) if state else StreamPosition()
        self._number, self._learned = (state["number"], state["learned"]) if state else (0, 0)
        self._begun = begun

    def _encoded(self, rows: list[Row]) -> Iterator[dict[str, Any]]:
        prepared = self._prepare(rows, self.counts)
        encoded = self._algorithm.encode_each(self._config, self._tokenizer, prepared, self.counts)
        if encoded is None:
            reason = f"streaming: {self._config.algorithm} does not encode the rows of this model one by one"
            raise GymError(ErrorCode.CONFIG_INVALID, reason, "remove streaming")
        return encoded


class _Examples:
    """The generator of a dataset. ``datasets`` deep-copies it before every iteration; a copy is the same stream."""

    def __init__(self, rows: StreamedRows, num_embeddings: int) -> None:
        self._rows, self._num_embeddings = rows, num_embeddings

    def __call__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return enumerate(self._rows.rows(self._num_embeddings))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Examples:
        return self


class StreamCheckpoints(TrainerCallback):
    """Stores the position of the stream in every checkpoint, and resumes from it."""

    def __init__(self, rows: StreamedRows, trainer: Any) -> None:
        self._rows, self._trainer = rows, trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.global_step:
            self._rows.start(None)
            return
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        stored = json.loads((checkpoint / FILE).read_text(encoding="utf-8"))
        # Restored at the first row, since the iterator of torch's dataloader draws a random number before it.
        self._rows.start(stored, lambda: self._trainer._load_rng_state(str(checkpoint)))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        learned = state.global_step * args.per_device_train_batch_size * args.gradient_accumulation_steps
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        write_atomically(checkpoint / FILE, json.dumps(self._rows.state(learned)).encode())


def follow_stream(trainer: Any, rows: Any) -> None:
    """Make the checkpoints of a trainer store the position of its rows if they are a stream."""
    if isinstance(rows, StreamedRows):
        trainer.add_callback(StreamCheckpoints(rows, trainer))


def check_streaming(config: TrainingConfig, num_processes: int) -> None:
    """Refuse ``streaming`` with keys that need all rows before the first step, or that need epochs."""
    if not config.streaming:
        return
    algorithm = ALGORITHMS.type_of(config.algorithm)
    keys = ("eval_split", "group_by_length", "tokenized_path", "auto_batch_size", "privacy")
    excluded = next((key for key in keys if getattr(config, key)), None)
    fraction = next((source.weight for source in config.data if source.weight % 1), None)
    strategies = ("save_strategy", "eval_strategy")
    epochs = next((key for key in strategies if getattr(config, key) == "epoch"), None)
    those = " or ".join(ALGORITHMS.own_with("streams"))
    refuse_first(
        (excluded, f"{excluded} needs all rows before the first step", f"remove {excluded}"),
        (epochs, f"{epochs} is epoch, but a stream has no epochs", f"set {epochs}: steps"),
        (config.max_steps is None, "the number of rows is not known", "set max_steps"),
        (
            fraction is not None,
            f"weight {fraction} needs all rows before the first step",
            "use integer weights",
        ),
        (not algorithm.streams, f"{config.algorithm} needs all rows before the first step", f"use {those}"),
        (
            num_processes > 1,
            f"{counted(num_processes, 'process')} would each read all rows",
            "use one process",
        ),
        prefix="streaming: ",
        remedy="remove streaming",
    )


def _require_embedded(row: dict[str, Any], num_embeddings: int) -> None:
    for key, ids in row.items():
        if key.endswith("ids") and max(ids, default=0) >= num_embeddings:
            reason = f"a row has token id {max(ids)}, but the embeddings have only {counted(num_embeddings, 'row')}"
            raise GymError(ErrorCode.CONFIG_INVALID, reason, "use the model's own tokenizer")
