"""Comparison of a written folder's configs and tokenizer with the source's, entry by entry.

Logits within the tolerance of a quantisation do not show another epsilon or rotary base, a program's logits do not
depend on its config, and probe texts have a small part of a vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.vocabulary import text_tokenizer
from gym_fed.core.errors import GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.text import plain
from gym_fed.export.source import Source, differs

_CONFIGS = {"config.json": "config", "generation_config.json": "generation_config"}
"""The files, and the model's attributes that they hold."""
_NOT_COMPARED = {
    "dtype",
    "torch_dtype",
    "quantization_config",
    "transformers_version",
    "auto_map",
    "use_cache",
}
"""Keys that a format may change: the types of its weights, and keys that do not describe the model."""
_TOKENIZER = "tokenizer.json"
_NOT_OF_THE_TOKENIZER = ("truncation", "padding")
_MISSING = object()
_SHOWN = 80


def compare_folder(folder: Path, source: Source, model: Any) -> dict[str, int]:
    """Compare the configs and ``tokenizer.json`` of a folder with the source's.

    Args:
        folder: The written folder.
        source: The exported model.
        model: The model that the folder must hold.

    Returns:
        The number of compared ``settings`` of the configs and ``entries`` of the tokenizer.

    Raises:
        GymError: ``EXPORT_DIFFERS`` naming the file and the first entry that differs.
    """
    settings = 0
    for name, attribute in _CONFIGS.items():
        if (config := getattr(model, attribute, None)) is None:
            continue
        if not (folder / name).is_file():
            raise _file_differs(name, "is missing")
        written = type(config).from_dict(read_object(folder / name)).to_dict()
        expected = config.to_dict()
        for key in sorted(expected.keys() | written.keys()):
            if key.startswith("_") or key in _NOT_COMPARED:
                continue
            settings += 1
            _require_same(name, key, expected.get(key, _MISSING), written.get(key, _MISSING))
    return {"settings": settings, "entries": _compare_tokenizer(folder, source)}


def _compare_tokenizer(folder: Path, source: Source) -> int:
    tokenizer = text_tokenizer(source.tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return 0  # a slow tokenizer: its files are copied, and its ids compared
    if not (folder / _TOKENIZER).is_file():
        raise _file_differs(_TOKENIZER, "is missing")
    expected, written = json.loads(backend.to_str()), read_object(folder / _TOKENIZER)
    for both in (expected, written):
        for key in _NOT_OF_THE_TOKENIZER:
            both.pop(key, None)
    if expected != written:
        for either in (expected, written):
            for path, _ in _leaves(either):
                _require_same(_TOKENIZER, ".".join(path), _at(expected, path), _at(written, path))
    return sum(1 for _ in _leaves(expected))


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and value of each text, number and empty container."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, below in items:
            yield from _leaves(below, (*path, str(key)))
    else:
        yield path, value


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and int(key) < len(value):
            value = value[int(key)]
        else:
            return _MISSING
    return value


def _require_same(file: str, key: str, expected: Any, written: Any) -> None:
    if _plain(expected) != _plain(written):
        raise _file_differs(
            file, f"has {plain(key, _SHOWN)} {_shown(written)}, the source has {_shown(expected)}"
        )


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: lists for tuples, texts for enumerations and types."""
    return value if value is _MISSING else json.loads(json.dumps(value, default=str))


def _shown(value: Any) -> str:
    return "nothing" if value is _MISSING else plain(repr(value), _SHOWN)


def _file_differs(file: str, why: str) -> GymError:
    return differs(f"{file} in the folder {why}")
