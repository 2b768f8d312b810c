"""Read and write ``tokenized_path``, a folder of encoded rows for runs with the same tokenizer and keys.

::

    train.arrow, eval.arrow    encoded rows, as an Arrow stream
    index.json                 written last: settings and counts of the rows, and the sha256 of each file
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from gym_fed.base.modeling.processors import is_processor, is_vision_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.files import atomic_file, file_sha256, fsync_folder, write_atomically
from gym_fed.core.registries import ALGORITHMS
from gym_fed.core.text import plain
from gym_fed.data.arrow_rows import ArrowRows, write_rows
from gym_fed.data.encoded_table import EncodedTable, is_encoded, largest_ids, write_encoded
from gym_fed.data.encoding import tokenizer_digest
from gym_fed.data.row_counts import RowCounts

FORMAT_VERSION = 3
"""Incremented with every change to the format or to the encoding of rows."""

_KEYS = (
    *("algorithm", "max_length", "packing", "assistant_only_loss", "mask_history", "reasoning"),
    *("default_system", "eval_split", "seed"),
)
"""Keys that determine how rows are encoded. The seed determines which rows are held out and their order."""

_INDEX = "index.json"
_MEDIA_MODEL = "the model reads images or audio, which are prepared during training"
_REMEDY = "use the settings that the rows were encoded with, or choose another tokenized_path"


@dataclass(frozen=True)
class RunRows:
    """The encoded rows of a run.

    Attributes:
        encoded: Encoded training rows.
        eval_encoded: Encoded rows of ``eval_data``; None if there are none.
        digests: Digests of both, as stored in the run folder.
        counts: Counts of learned, truncated and dropped training rows.
        eval_counts: Counts of the rows of ``eval_data``.
    """

    encoded: Any
    eval_encoded: Any
    digests: tuple[str, str | None]
    counts: RowCounts
    eval_counts: RowCounts | None


class TokenizedRows:
    """The folder ``config.tokenized_path``, which may not exist yet."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def is_filled(self) -> bool:
        """Return True if the folder contains encoded rows."""
        return (self.path / _INDEX).is_file()

    def has_held_out(self) -> bool:
        """Return True if the folder contains evaluation data."""
        return self.is_filled() and self.index()["eval_counts"] is not None

    def index(self) -> dict[str, Any]:
        """Return the content of ``index.json``.

        Raises:
            GymError: ``STATE_CORRUPT`` if it cannot be read or has a different version.
        """
        try:
            index = json.loads((self.path / _INDEX).read_text(encoding="utf-8"))
            if (version := index["format"]) != FORMAT_VERSION:
                raise ValueError(
                    f"its format is {plain(version, 40)}, but this release reads {FORMAT_VERSION}"
                )
            if not (isinstance(index["made_by"], dict) and isinstance(index["files"], dict)):
                raise ValueError("made_by and files are not mappings")
            for key in ("digests", "counts", "eval_counts"):
                index[key]
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise self._unusable(_INDEX, error) from error
        return dict(index)

    def read(self, config: TrainingConfig, tokenizer: Any, digests: tuple[str, str | None] | None) -> RunRows:
        """Return the rows.

        Args:
            config: The run's config, whose encoding keys must equal those of the run that wrote the folder.
            tokenizer: The run's tokenizer, which must encode like that of the run that wrote the folder.
            digests: Digests of the current rows of ``data`` and ``eval_data``; None if there are none.

        Raises:
            GymError: ``CONFIG_INVALID`` if the keys, tokenizer or chat template differ; ``DATA_INVALID`` if the rows
                differ; ``STATE_CORRUPT`` if the files have changed.
        """
        index = self.index()
        now = encoding_facts(config, tokenizer)
        for key in now:
            if (then := index["made_by"].get(key)) != now[key]:
                reason = f"tokenized_path: {self._difference(key, then, now[key])}"
                raise GymError(ErrorCode.CONFIG_INVALID, reason, _REMEDY)
        reason = f"tokenized_path: the rows of data and eval_data differ from those in {self.path}"
        remedy = f"delete {self.path}, or remove data and eval_data: the encoded rows suffice"
        differ = digests is not None and list(digests) != index["digests"]
        refuse_first((differ, reason, remedy), code=ErrorCode.DATA_INVALID)
        size, eval_counts = len(tokenizer), None
        counts = RowCounts(**index["counts"])
        encoded, eval_encoded = self._rows("train.arrow", index, size, counts), None
        if index["eval_counts"] is not None:
            eval_counts = RowCounts(**index["eval_counts"])
            eval_encoded = self._rows("eval.arrow", index, size, eval_counts)
        return RunRows(encoded, eval_encoded, tuple(index["digests"]), counts, eval_counts)

    def write(self, config: TrainingConfig, tokenizer: Any, rows: RunRows) -> dict[str, Any]:
        """Write the rows of a run, and return the index.

        Raises:
            GymError: ``FILE_EXISTS`` if the folder contains other files.
        """
        self.require_free()
        self.path.mkdir(parents=True, exist_ok=True)
        files = {"train.arrow": rows.encoded, "eval.arrow": rows.eval_encoded}
        written = {name: self._write(name, part) for name, part in files.items() if part is not None}
        index = {
            "format": FORMAT_VERSION,
            "made_by": encoding_facts(config, tokenizer),
            "digests": list(rows.digests),
            "counts": rows.counts.facts(),
            "eval_counts": None if rows.eval_counts is None else rows.eval_counts.facts(),
            "files": written,
        }
        write_atomically(self.path / _INDEX, json.dumps(index, indent=1, sort_keys=True).encode())
        fsync_folder(self.path)
        return index

    def require_free(self) -> None:
        """Refuse a folder that contains other files."""
        own = {"train.arrow", "eval.arrow", _INDEX}
        other_files = sorted(file.name for file in self.path.glob("*") if file.name not in own)
        if other_files:
            reason = (
                f"tokenized_path: {self.path} is not empty ({other_files[0]}) and contains no encoded rows"
            )
            raise GymError(ErrorCode.FILE_EXISTS, reason, "choose an empty or new folder")

    def _write(self, name: str, rows: Any) -> str:
        with atomic_file(self.path / name) as sink:
            is_table = isinstance(rows, EncodedTable)
            for _ in write_encoded(rows, sink, {}) if is_table else write_rows(rows, sink):
                pass
        return file_sha256(self.path / name)

    def _rows(self, name: str, index: dict[str, Any], size: int, counts: RowCounts) -> Any:
        file = self.path / name
        try:
            if file_sha256(file) != index["files"][name]:
                raise ValueError("its bytes have changed")
            if not is_encoded(file):
                return list(ArrowRows(file))
            table = EncodedTable(file, counts, largest_ids(file))
            for key, largest in table.largest.items():
                if largest >= size:
                    raise ValueError(f"{key} has ids outside the model's vocabulary")
            return table
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise self._unusable(name, error) from error

    def _unusable(self, name: str, error: Exception) -> GymError:
        reason = f"tokenized_path: {self.path / name} cannot be used: {error}"
        return GymError(ErrorCode.STATE_CORRUPT, reason, f"delete {self.path} to encode the rows again")

    def _difference(self, key: str, then: Any, now: Any) -> str:
        if key in ("tokenizer", "chat_template"):
            part = "chat template" if key == "chat_template" else key
            return f"the rows in {self.path} were encoded with a different {part}"
        return f"the rows in {self.path} were encoded with {key} {then!r}, but it is now {now!r}"


def check_tokenized(config: TrainingConfig) -> None:
    """Refuse ``tokenized_path`` if later runs could not reuse the encoded rows."""
    if config.tokenized_path is None:
        return
    algorithm = ALGORITHMS.type_of(config.algorithm)
    reads_images = algorithm.keeps_encoded and algorithm.reads_images and config.model is not None
    varies = f"the rows of {config.algorithm} need a second model, or are generated during training"
    refuse_first(
        (not algorithm.keeps_encoded, varies),
        (reads_images and is_vision_model(str(config.model)), _MEDIA_MODEL),
        prefix="tokenized_path: ",
        remedy="remove the key",
    )


def encoding_facts(
    config: TrainingConfig, tokenizer: Any, *, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return all settings that determine how rows are encoded, as JSON values, except the keys in ``without``."""
    if is_processor(tokenizer):
        raise GymError(ErrorCode.CONFIG_INVALID, f"tokenized_path: {_MEDIA_MODEL}", "remove the key")
    values = config.model_dump(mode="json")
    template = tokenizer.chat_template or ""
    return {
        **{key: values[key] for key in _KEYS if key not in without},
        "privacy": config.privacy is not None,  # with privacy, rows without labels are kept
        "chat_template": hashlib.sha256(template.encode()).hexdigest(),
        "tokenizer": tokenizer_digest(tokenizer),
    }
