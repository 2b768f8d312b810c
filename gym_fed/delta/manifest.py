"""The manifest of a ``.gymdelta``: its base, and the name, shape, codec and parameters of every tensor.

At one bit per weight the header's size matters, so the rows of the canonical JSON are short: codecs with
their parameters are listed once in a table, and tensors that differ only in the first number of their dotted name
(the layers of a model) share one row. The parameter ``bytes``, a size that depends on the values, is 0 in the table;
the sizes are in a list. docs/delta-format.md has the grammar. This module does not import torch.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_json, each_once, no_constant
from gym_fed.core.text import counted
from gym_fed.delta.added_tokens import AddedTokens, written_ranges

FORMAT_VERSION = 1
MAX_TENSOR_ELEMENTS = 1 << 40

_RANGES = re.compile(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", re.ASCII)
_INDEX = re.compile(r"0|[1-9]\d{0,8}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)

ParamValue = int | float | str

_BYTES = "bytes"


@dataclass(frozen=True)
class TensorRecord:
    """The name, shape, codec and normalised codec parameters of one tensor."""

    name: str
    shape: tuple[int, ...]
    codec: str
    params: dict[str, ParamValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The manifest; ``tensors`` are in payload order, sorted by name."""

    base_model: str
    base_digest: str
    tensors: tuple[TensorRecord, ...]
    extra: dict[str, str] = field(default_factory=dict)
    vocabulary: AddedTokens = field(default_factory=AddedTokens)

    @classmethod
    def of(
        cls,
        base_model: str,
        base_digest: str,
        tensors: Iterable[TensorRecord],
        extra: Mapping[str, str] | None,
        vocabulary: AddedTokens | None = None,
    ) -> Manifest:
        """Create a manifest from records in any order; raises the errors of ``parse``."""
        ordered = tuple(sorted(tensors, key=lambda record: record.name))
        for first, second in itertools.pairwise(ordered):
            if first.name == second.name:
                raise _invalid(f"tensor {first.name!r} is listed twice")
        return cls(base_model, base_digest, ordered, dict(extra or {}), vocabulary or AddedTokens())

    def to_json(self) -> str:
        """The canonical JSON of this manifest."""
        texts: dict[str, bytes] = {}  # a file has few codecs, and thousands of tensors
        shared = [{**r.params, _BYTES: 0} if _BYTES in r.params else r.params for r in self.tensors]
        keys = [f"{r.codec!r} {params!r}" for r, params in zip(self.tensors, shared, strict=True)]
        for record, params, key in zip(self.tensors, shared, keys, strict=True):
            if key not in texts:
                texts[key] = canonical_json([record.codec, params])
        codecs = sorted(set(texts.values()))
        places = {text: index for index, text in enumerate(codecs)}
        rows = _collapse(self.tensors, [places[texts[key]] for key in keys])
        document: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "base_model": self.base_model,
            "base_digest": self.base_digest,
            "codecs": [json.loads(text) for text in codecs],
            "tensors": sorted(rows, key=canonical_json),
        }
        if self.extra:
            document["extra"] = self.extra
        if self.vocabulary:
            document["vocabulary"] = self.vocabulary.to_value()
        if sizes := [r.params[_BYTES] for r in self.tensors if _BYTES in r.params]:
            document["sizes"] = sizes
        return canonical_json(document).decode("utf-8")

    @classmethod
    def parse(cls, text: str, max_tensors: int) -> Manifest:
        """Parse a manifest, without checking codecs and their parameters.

        Raises:
            GymError: ``DELTA_INVALID`` naming the tensor or the key.
        """
        document = strict_json(text, "manifest")
        _check_keys(document)
        codecs = [_codec_row(row) for row in document["codecs"]]
        records: list[TensorRecord] = []
        for row in document["tensors"]:
            records.extend(_expand(row, codecs, max_tensors - len(records)))
        vocabulary = AddedTokens.parse(document["vocabulary"]) if "vocabulary" in document else None
        base = (document["base_model"], document["base_digest"])
        manifest = cls.of(*base, records, document.get("extra"), vocabulary)
        _set_sizes(manifest.tensors, document.get("sizes", []))
        return manifest

    def require_canonical(self, text: str) -> None:
        """Refuse a text that is equivalent to this manifest but not its canonical JSON.

        Raises:
            GymError: ``DELTA_INVALID``.
        """
        if self.to_json() != text:
            raise _invalid("manifest is not in canonical form", "write the file with gym-fed's own writer")


def strict_json(text: str, what: str) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys, NaN, infinities, lone surrogates or deep nesting.

    Raises:
        GymError: ``DELTA_INVALID``.
    """
    try:
        value = json.loads(text, object_pairs_hook=each_once, parse_constant=no_constant)
        canonical_json(value)
    except RecursionError:
        raise _invalid(f"{what} is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise _invalid(f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise _invalid(f"{what} is not a JSON object")
    return value


def _collapse(records: Iterable[TensorRecord], codecs: Iterable[int]) -> list[list[Any]]:
    """Collapse records into rows of the manifest; ``codecs`` are indices into its codec table."""
    groups: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
    rows: list[list[Any]] = []
    for record, codec in zip(records, codecs, strict=True):
        template, index = _split_index(record.name)
        if index is None:
            rows.append([record.name, list(record.shape), codec])
        else:
            groups.setdefault((template, record.shape, codec), []).append(index)
    for (template, shape, codec), indices in groups.items():
        if len(indices) == 1:
            rows.append([template.replace("*", str(indices[0])), list(shape), codec])
        else:
            rows.append([template, written_ranges(sorted(indices)), list(shape), codec])
    return rows


def _set_sizes(records: Iterable[TensorRecord], sizes: list[Any]) -> None:
    """Put the listed sizes into the parameters of the records that have one, in order of name."""
    sized = [record for record in records if _BYTES in record.params]
    if len(sizes) != len(sized):
        raise _invalid(
            f"manifest key 'sizes' has {counted(len(sizes), 'entry')} for "
            f"{counted(len(sized), 'tensor')} of variable size"
        )
    for record, size in zip(sized, sizes, strict=True):
        if type(size) is not int or size < 1:
            raise _invalid(f"tensor {record.name!r}: size {_short(size)} is not a positive integer")
        record.params[_BYTES] = size


def _split_index(name: str) -> tuple[str, int | None]:
    """Split ``a.3.b`` into ``("a.*.b", 3)``; a name without a number between dots has no index."""
    parts = name.split(".")
    if "*" not in name:
        for place, part in enumerate(parts):
            if _INDEX.fullmatch(part):
                return ".".join([*parts[:place], "*", *parts[place + 1 :]]), int(part)
    return name, None


def _expand(row: Any, codecs: list[tuple[str, dict[str, ParamValue]]], room: int) -> list[TensorRecord]:
    if not isinstance(row, list) or len(row) not in (3, 4) or not isinstance(row[0], str):
        raise _invalid(f"tensor row {_short(row)} is not [name, shape, codec] or [name, range, shape, codec]")
    name, shape, codec = row[0], row[-2], row[-1]
    if not name or not name.isprintable():
        raise _invalid(f"tensor name {_short(name)} is empty or not printable")
    if not isinstance(shape, list) or not all(type(side) is int and side > 0 for side in shape):
        raise _invalid(f"tensor {name!r}: shape {_short(shape)} is not a list of positive integers")
    if math.prod(shape) > MAX_TENSOR_ELEMENTS:
        raise _invalid(f"tensor {name!r}: shape {_short(shape)} has more than {MAX_TENSOR_ELEMENTS} elements")
    if type(codec) is not int or not 0 <= codec < len(codecs):
        raise _invalid(f"tensor {name!r}: codec number {_short(codec)} is not in the table of {len(codecs)}")
    names = [name] if len(row) == 3 else _expand_names(name, row[1], room)
    if len(names) > room:
        raise _invalid(f"tensor {name!r}: the file lists more tensors than allowed")
    return [TensorRecord(n, tuple(shape), codecs[codec][0], dict(codecs[codec][1])) for n in names]


def _expand_names(template: str, ranges: Any, room: int) -> list[str]:
    if template.count("*") != 1 or not isinstance(ranges, str) or not _RANGES.fullmatch(ranges):
        raise _invalid(f"tensor {template!r}: {_short(ranges)} is not a list of ranges for one '*'")
    names: list[str] = []
    for run in ranges.split(","):
        low, _, high = run.partition("-")
        first, last = int(low), int(high or low)
        if last - first >= room - len(names):
            raise _invalid(f"tensor {template!r}: the file lists more tensors than allowed")
        names.extend(template.replace("*", str(index)) for index in range(first, last + 1))
    return names


def _codec_row(row: Any) -> tuple[str, dict[str, ParamValue]]:
    if not isinstance(row, list) or [type(value) for value in row] != [str, dict]:
        raise _invalid(f"codec row {_short(row)} is not [name, parameters]")
    for key, value in row[1].items():
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise _invalid(
                f"codec {row[0]!r}: parameter {key!r} is {_short(value)}, not a number or a string"
            )
    return row[0], row[1]


def _check_keys(document: dict[str, Any]) -> None:
    if document.get("format") != FORMAT_VERSION or type(document["format"]) is not int:
        raise _invalid(
            f"format version {_short(document.get('format'))} is not supported (this is {FORMAT_VERSION})",
            "use the release of gym-fed that wrote the file, or a newer one",
        )
    required = {"format": int, "base_model": str, "base_digest": str, "codecs": list, "tensors": list}
    for key, kind in required.items():
        if not isinstance(document.get(key), kind):
            raise _invalid(f"manifest key {key!r} is missing or not a {kind.__name__}")
    unknown = set(document) - set(required) - {"extra", "sizes", "vocabulary"}
    if unknown:
        raise _invalid(f"manifest has the unknown key {min(unknown)!r}")
    if not _DIGEST.fullmatch(document["base_digest"]):
        raise _invalid(f"base_digest {_short(document['base_digest'])} is not sha256:<64 hex digits>")
    extra = document.get("extra", {"": ""})
    if not isinstance(extra, dict) or not extra or not all(isinstance(v, str) for v in extra.values()):
        raise _invalid("manifest key 'extra' is not a non-empty object of strings")
    if not isinstance(document.get("sizes", []), list):
        raise _invalid("manifest key 'sizes' is not a list")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _invalid(message: str, hint: str = "") -> GymError:
    return GymError(ErrorCode.DELTA_INVALID, message, hint)
