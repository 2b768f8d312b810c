"""Select the files of a base model that a hub serves to contributors: names, sizes and licence.

Allowed are safetensors weights, JSON, tokenizer files, a chat template and accompanying texts, without subfolders,
code or references to code. The hub applies these rules before it serves a listing, and the contributor before a
download and again before loading.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import lies_in
from gym_fed.core.json_files import canonical_json, read_object
from gym_fed.core.text import counted, plain

REDISTRIBUTABLE = frozenset(
    {"apache-2.0", "bsd-2-clause", "bsd-3-clause", "cc-by-4.0", "cc0-1.0", "mit", "unlicense"}
)
"""Licences, as spelled in model cards, that allow redistribution of a model with its licence and notices."""

MAX_FILES = 2_000
MAX_TENSORS = 200_000
MAX_TEXT_BYTES = 4 << 20
"""Maximum size of a licence, a notice or a model card."""
_MAX_HEAD_CHARS = 1 << 16
"""Maximum number of characters of a model card that are read for the licence."""
MAX_TOKENIZER_BYTES = 256 << 20
"""Maximum size of a tokenizer file; the largest take about 40 MB."""
MAX_SETTINGS_BYTES = 32 << 20
"""Maximum size of other JSON, which is read as a whole; the index of 20,000 tensors takes 2 MB."""
MAX_WEIGHTS_BYTES = 256 << 30
"""Maximum size of one weight file."""
CARD = "README.md"
TRAVELS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "COPYING*")
"""Patterns of licence and notice files, which are copied with every model."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_TEXTS = re.compile(r"(LICEN[CS]E|NOTICE|COPYING)([.-][A-Za-z0-9.-]{1,32})?|README\.md", re.ASCII)
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_SETTINGS = frozenset(
    {
        _INDEX,
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "special_tokens_map.json",
        "tokenizer_config.json",
    }
)
_TOKENIZER = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "merges.txt",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
    }
)
CODE_KEYS = ("auto_map", "custom_pipelines", "custom_generate")
"""Keys that make transformers load Python files from the model's repository."""


@dataclass(frozen=True)
class BaseFile:
    """A file of a base model with name, size in bytes and sha256."""

    name: str
    size_bytes: int
    sha256: str


def most_bytes(name: str) -> int:
    """Return the maximum size of a file of this name; 0 for a name that is not allowed."""
    if not _NAME.fullmatch(name):
        return 0
    if _TEXTS.fullmatch(name):
        return MAX_TEXT_BYTES
    if name in _SETTINGS:
        return MAX_SETTINGS_BYTES
    if name in _TOKENIZER:
        return MAX_TOKENIZER_BYTES
    return MAX_WEIGHTS_BYTES if name.endswith(".safetensors") and not name.startswith("adapter") else 0


def check_listing(files: Sequence[BaseFile], who: str) -> None:
    """Check that a list of files is a base model that may be served.

    Raises:
        GymError: ``MODEL_INVALID`` with the first file that is not allowed, or what is missing.
    """
    if len(files) > MAX_FILES:
        raise _invalid(who, f"lists {counted(len(files), 'file')}; a base has at most {MAX_FILES}")
    seen: set[str] = set()
    for file in files:
        shown, most = plain(file.name, 140), most_bytes(file.name)
        if not most:
            raise _invalid(who, f"lists a file {shown!r}, which a served base may not have")
        if not 0 < file.size_bytes <= most:
            raise _invalid(
                who, f"lists {shown!r} with {counted(file.size_bytes, 'byte')}; it may have 1 to {most}"
            )
        if not _SHA256.fullmatch(file.sha256):
            raise _invalid(who, f"lists {shown!r} with the sha256 {plain(file.sha256, 80)!r}")
        if file.name.lower() in seen:  # the same file on case-insensitive file systems
            raise _invalid(who, f"lists {shown!r} twice")
        seen.add(file.name.lower())
    if "config.json" not in seen or not any(name.endswith(".safetensors") for name in seen):
        raise _invalid(who, "lists no config.json, or no weights")


def listing_sha256(files: Iterable[BaseFile]) -> str:
    """Return the hex sha256 of a list of files, independent of its order."""
    rows = sorted([file.name, file.size_bytes, file.sha256] for file in files)
    return hashlib.sha256(canonical_json(rows)).hexdigest()


def names_in(folder: Path) -> list[str]:
    """Return the files of a model folder that make up the base: indexed weights and accompanying files.

    Raises:
        GymError: ``MODEL_INVALID`` for an adapter, weights that are not in safetensors, a link out of the folder, and
            as in ``check_settings``.
    """
    who = str(folder)
    if (folder / "adapter_config.json").is_file():
        raise _invalid(who, "is an adapter, not a base")
    candidates = (
        p for p in folder.iterdir() if p.is_file() and p.stat().st_size
    )  # empty ones are not served
    names = sorted(p.name for p in candidates if most_bytes(p.name) and not p.name.endswith(".safetensors"))
    weights = [_WEIGHTS]  # transformers prefers it to the index
    if (folder / _WEIGHTS).is_file():
        names = [name for name in names if name != _INDEX]
    elif _INDEX in names:
        weights = _weights_of_index(folder / _INDEX)
    missing = [name for name in weights if not (folder / name).is_file()]
    if missing:
        raise _invalid(who, f"has no {missing[0]}: only safetensors weights can be served")
    files = [*names, *weights]
    for name in files:
        if not lies_in(folder / name, folder):
            raise _invalid(
                who, f"has {name} as a link to {(folder / name).resolve()}: only its own files can be served"
            )
    check_settings(folder, files)
    return files


def check_settings(folder: Path, names: Sequence[str]) -> None:
    """Check that a folder's JSON refers to no code and no file outside the folder.

    Raises:
        GymError: ``MODEL_INVALID`` with the file's name.
    """
    for name in names:
        if name == _INDEX:
            unlisted = [shard for shard in _weights_of_index(folder / name) if shard not in names]
            if unlisted:
                raise _invalid(name, f"lists {plain(unlisted[0], 140)!r}, which is not one of its files")
        elif name in _SETTINGS:
            for key in _keys(_object(folder / name)):
                if key in CODE_KEYS:
                    raise _invalid(name, f"has {key}: a base that needs its own code cannot be served")
    if "config.json" in names and "quantization_config" in _object(folder / "config.json"):
        raise _invalid("config.json", "has quantization_config: a quantised base cannot be served")


def licence_of(folder: Path) -> str:
    """Return the licence on the model card in lower case; empty without a card, or if it is "unknown"."""
    from gym_fed.core.plain_yaml import parse_value

    text = ""
    if not (folder / CARD).is_file() or not lies_in(
        folder / CARD, folder
    ):  # opening a named pipe would block
        return ""
    with suppress(OSError), (folder / CARD).open(encoding="utf-8", errors="replace") as file:
        text = file.read(_MAX_HEAD_CHARS)
    if not text.startswith("---\n"):
        return ""
    try:
        head, end, _ = text[4:].partition("\n---")
        card = parse_value(head if end else head.rpartition("\n")[0])  # without the truncated last line
    except ValueError:
        return ""
    licence = (card.get("license_name") or card.get("license")) if isinstance(card, dict) else None
    name = licence.strip().lower()[:80] if isinstance(licence, str) else ""
    return "" if name == "unknown" else name


def _weights_of_index(path: Path) -> list[str]:
    weight_map = _object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise _invalid(path.name, "has no weight_map of names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if most_bytes(name) != MAX_WEIGHTS_BYTES:
            raise _invalid(path.name, f"lists {plain(name, 140)!r}, which is not a weight file")
    return names


def _object(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except OSError as error:
        raise _invalid(path.name, f"cannot be read: {error.strerror}") from error


def _keys(value: object) -> Iterable[str]:
    """Yield all keys at any depth."""
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield from node
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)


def _invalid(who: str, what: str) -> GymError:
    return GymError(ErrorCode.MODEL_INVALID, f"{plain(who)} {what}")
