"""Cache encoded rows on disk, keyed by a digest of sources, steps, tokenizer and settings.

A folder per digest contains safetensors shards and ``index.json``, which is written last; a folder without it is
ignored::

    <digest>/shard-00000.safetensors    input_ids, labels [tokens] int32; ends [rows] int64
    <digest>/index.json                 digest of each shard, row counts, and the data of the digest
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256, fsync_folder, write_atomically
from gym_fed.data.encoding import Encoded
from gym_fed.data.row_counts import RowCounts
from gym_fed.version import __version__

FORMAT_VERSION = 4
"""Version of the format and of the encoding rules; rows cached by a different version are not read."""

_SHARD_ROWS = 4096


class EncodedCache:
    """One cache entry of encoded rows.

    Args:
        folder: Folder of the cache, which several data sets share.
        recipe: JSON value with everything that the rows depend on.
    """

    def __init__(self, folder: Path, recipe: Any) -> None:
        self.digest = _digest(recipe)
        self._recipe = recipe
        self._folder = folder / self.digest

    def is_filled(self) -> bool:
        return (self._folder / "index.json").is_file()

    def counts(self) -> RowCounts:
        """The row counts of the encoding."""
        return RowCounts(**json.loads((self._folder / "index.json").read_text(encoding="utf-8"))["counts"])

    def read(self) -> Iterator[Encoded]:
        """Yield the rows, one shard in memory at a time.

        Raises:
            GymError: ``STATE_CORRUPT`` if a shard is missing or does not match the index.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        index = json.loads((self._folder / "index.json").read_text(encoding="utf-8"))
        for name, sha256 in index["shards"].items():
            file = self._folder / name
            try:
                if file_sha256(file) != sha256:
                    raise ValueError("its bytes have changed")
                shard = load_file(file)
            except (OSError, ValueError, SafetensorError) as error:
                raise GymError(
                    ErrorCode.STATE_CORRUPT,
                    f"{file}: cannot be used: {error}",
                    f"delete {self._folder}; the rows are encoded again",
                ) from error
            start = 0
            for end in shard["ends"].tolist():
                yield {key: shard[key][start:end].tolist() for key in ("input_ids", "labels")}
                start = end

    def fill(
        self, rows: Iterable[Encoded], recipe_now: Callable[[], Any], counts: RowCounts
    ) -> Iterator[Encoded]:
        """Yield ``rows`` while writing them; the entry becomes valid after the last row.

        Nothing is cached if ``recipe_now()`` then differs from the original recipe, because a source changed while it
        was read. ``counts`` are the counts of the rows, complete after the last one.
        """
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        part = self._folder.with_name(f".{self.digest}.{secrets.token_hex(8)}.partial")
        part.mkdir()
        try:
            source = iter(rows)
            shards: dict[str, str] = {}
            while chunk := list(islice(source, _SHARD_ROWS)):
                name = f"shard-{len(shards):05}.safetensors"
                _write_shard(part / name, chunk)
                shards[name] = file_sha256(part / name)
                yield from chunk
            index = {"shards": shards, "recipe": self._recipe, "counts": counts.as_dict()}
            write_atomically(part / "index.json", json.dumps(index, indent=1, sort_keys=True).encode())
            if (
                _digest(recipe_now()) == self.digest and not self.is_filled()
            ):  # another process may have written it
                os.replace(part, self._folder)
                fsync_folder(self._folder.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _digest(recipe: Any) -> str:
    text = json.dumps([FORMAT_VERSION, __version__, recipe], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _write_shard(file: Path, rows: list[Encoded]) -> None:
    from safetensors.numpy import save

    tensors: dict[str, Any] = {
        key: np.fromiter((i for row in rows for i in row[key]), dtype=np.int32)
        for key in ("input_ids", "labels")
    }
    tensors["ends"] = np.cumsum([len(row["input_ids"]) for row in rows], dtype=np.int64)
    write_atomically(file, save(tensors))


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the digest of everything that affects encoding: vocabulary, merges, rules, special tokens, chat
    template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    parts = [type(tokenizer).__name__, rules, tokenizer.chat_template or "", str(tokenizer.eos_token_id)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
