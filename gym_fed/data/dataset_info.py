"""Read LLaMA-Factory's ``dataset_info.json``: the source of each dataset, and the names of its columns.

The keys are those that LLaMA-Factory 0.9 documents in data/README.md. As in LLaMA-Factory, if ``columns`` is given,
columns that it does not list are not read; if ``tags`` is given, unlisted tags keep their defaults.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.yaml.file import validate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.data.formats.base import BadRow, Raw, as_object
from gym_fed.data.hub import hub_rows
from gym_fed.data.reading import PlacedRow, converted, iter_rows

T = TypeVar("T")


def reservoir(items: Iterable[T], count: int, seed: int) -> Iterator[T]:
    """Sample ``count`` items uniformly, in their order, with at most ``count`` items in memory (Vitter 1985, algorithm
    R).

    If there are fewer items, they are repeated from the first one until ``count`` is reached.
    """
    rng = random.Random(seed)
    sample: list[tuple[int, T]] = []
    for index, item in enumerate(items):
        if index < count:
            sample.append((index, item))
        elif (place := rng.randrange(index + 1)) < count:
            sample[place] = (index, item)
    sample.sort(key=lambda pair: pair[0])
    for turn in range(count if sample else 0):
        yield sample[turn % len(sample)][1]


class Columns(StrictModel):
    """Column names in the data."""

    prompt: str | None = None
    query: str | None = None
    response: str | None = None
    history: str | None = None
    messages: str | None = None
    system: str | None = None
    tools: str | None = None
    images: str | None = None
    videos: str | None = None
    audios: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    kto_tag: str | None = None


class Tags(StrictModel):
    """Keys and speaker names of a conversation."""

    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"


class DatasetEntry(StrictModel):
    """A dataset in the file."""

    file_name: str | None = None
    """A file or folder, relative to the folder of dataset_info.json."""
    hf_hub_url: str | None = None
    ms_hub_url: str | None = None
    om_hub_url: str | None = None
    script_url: str | None = None
    cloud_file_name: str | None = None
    """An fsspec URL."""
    formatting: Literal["alpaca", "sharegpt", "openai"] = "alpaca"
    ranking: bool = False
    subset: str | None = None
    split: str | None = None
    folder: str | None = None
    num_samples: int | None = Field(default=None, ge=1)
    columns: Columns | None = None
    tags: Tags = Tags()


_DEFAULT_COLUMNS = Columns(prompt="instruction", query="input", response="output", messages="conversations")
# gym-fed's names by LLaMA-Factory's names; the second item of a pair is True if a row must have the key
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
_SHARED = ("system", "tools", "images", "videos", "audios", "chosen", "rejected", "kto_tag")
_NEEDED = ("prompt", "messages", "response", "chosen", "rejected", "kto_tag")


def read_dataset_info(path: Path) -> dict[str, DatasetEntry]:
    """Read every dataset in the file, by name.

    Args:
        path: The file, or its folder.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``CONFIG_INVALID`` naming the dataset and key that cannot be read.
    """
    file = path / "dataset_info.json" if path.is_dir() else path
    if not file.is_file():
        raise GymError(
            ErrorCode.FILE_NOT_FOUND,
            f"no dataset_info.json at {file}",
            "set dataset_dir to its folder; or use files, or datasets from `gym data catalogue`: "
            "gym train --model MODEL --data my.jsonl",
        )
    values = read_object(file, ErrorCode.CONFIG_INVALID, "expected an object with one object per dataset")
    if not all(isinstance(value, dict) for value in values.values()):
        raise GymError(ErrorCode.CONFIG_INVALID, f"{file}: expected an object with one object per dataset")
    return {name: validate(value, DatasetEntry, f"{file}: {name}") for name, value in values.items()}


def dataset_rows(name: str, info: Path, *, seed: int = 0) -> Iterator[PlacedRow]:
    """Yield the rows of one dataset of ``info``.

    Raises:
        GymError: ``NOT_FOUND`` for a name that is not in the file; ``CONFIG_INVALID`` for unsupported sources; as
            ``load_rows`` and ``hub_rows``.
    """
    _require_here(name, info)
    entries = read_dataset_info(info)
    if name not in entries:
        import difflib

        close = difflib.get_close_matches(name, entries, n=3) or sorted(entries)[:8]
        raise GymError(ErrorCode.NOT_FOUND, f"{info}: no dataset {name!r}", f"such as {', '.join(close)}")
    rows = _rows(name, entries[name], info if info.is_dir() else info.parent)
    count = entries[name].num_samples
    yield from rows if count is None else reservoir(rows, count, seed)


def _require_here(name: str, info: Path) -> None:
    """Raise an error with the location of LLaMA-Factory's demo datasets if its list is missing."""
    from gym_fed.config.train.catalogue import catalogue

    entry = catalogue().get(name)
    if entry is not None and entry.llamafactory is not None and not info.exists():
        raise GymError(
            ErrorCode.FILE_NOT_FOUND,
            f"no dataset_info.json at {info}, but the rows of {name!r} are in LLaMA-Factory's repository",
            "clone github.com/hiyouga/LLaMA-Factory and set dataset_dir: LLaMA-Factory/data, or use a "
            "dataset from `gym data catalogue` that is on the Hub",
        )


def _rows(name: str, entry: DatasetEntry, base: Path) -> Iterator[PlacedRow]:
    format = _format(entry)

    def rename(raw: Any) -> Raw:
        return _renamed(as_object(raw), entry)

    if entry.script_url is not None:
        raise _refused(name, "script_url would run the dataset's code", "convert the data to files")
    if entry.hf_hub_url is not None:
        raw = hub_rows(entry.hf_hub_url, subset=entry.subset, split=entry.split, folder=entry.folder)
        yield from converted(raw, format, rename)
    elif entry.cloud_file_name is not None:
        yield from iter_rows(entry.cloud_file_name, format, rename=rename, text_lines=True)
    elif entry.file_name is not None:
        path = base / entry.file_name
        yield from iter_rows(
            path / entry.folder if entry.folder else path, format, rename=rename, text_lines=True
        )
    elif entry.ms_hub_url or entry.om_hub_url:
        hub = "ModelScope" if entry.ms_hub_url else "Modelers"
        raise _refused(
            name,
            f"is only on {hub}, which gym-fed does not support",
            "download it and set file_name",
        )
    else:
        raise _refused(name, "has no source", "set file_name or hf_hub_url")


def _refused(name: str, problem: str, remedy: str) -> GymError:
    return GymError(ErrorCode.CONFIG_INVALID, f"dataset_info.json: {name}: {problem}", remedy)


def _format(entry: DatasetEntry) -> str:
    columns = entry.columns or _DEFAULT_COLUMNS
    if entry.ranking:
        return "preference"
    if columns.kto_tag:
        return "kto"
    if entry.formatting != "alpaca":
        return "sharegpt"
    return "alpaca" if columns.response else "text"


def _renamed(raw: Raw, entry: DatasetEntry) -> Raw:
    """Rename a row's keys to those of gym-fed's formats."""
    columns = entry.columns or _DEFAULT_COLUMNS
    format = _format(entry)
    keys = {key: key for key in _SHARED}
    if format == "text":
        keys = {"prompt": "text"}
    elif entry.formatting == "alpaca":
        keys |= _ALPACA
    else:
        keys["messages"] = "conversations"
    if entry.ranking:
        keys.pop("response", None)
        ranked = {key: getattr(columns, key) or key for key in ("chosen", "rejected")}
        columns = columns.model_copy(update=ranked)
    row: Raw = {}
    for key, ours in keys.items():
        column = getattr(columns, key)
        if column is None:
            continue
        if column in raw:
            row[ours] = raw[column]
        elif key in _NEEDED:
            raise BadRow(f"has no column {column!r}", "dataset_info.json lists it under columns")
    if "conversations" in row:
        row["conversations"] = [_retagged(turn, entry.tags) for turn in _turns(row["conversations"])]
        for key in ("chosen", "rejected"):
            if isinstance(row.get(key), dict):
                row[key] = _retagged(row[key], entry.tags)
            elif isinstance(row.get(key), list):
                row[key] = [_retagged(turn, entry.tags) for turn in row[key]]
    return row


def _turns(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise BadRow("the conversation is not a list of turns", "it needs at least a question and an answer")
    return value


def _retagged(turn: Any, tags: Tags) -> Raw:
    """Convert a turn to ShareGPT's keys."""
    turn = as_object(turn)
    if tags.role_tag not in turn:
        raise BadRow(f"a turn has no {tags.role_tag!r}", "dataset_info.json sets it under tags")
    names = {
        tags.user_tag: "human",
        tags.assistant_tag: "gpt",
        tags.observation_tag: "observation",
        tags.function_tag: "function_call",
        tags.system_tag: "system",
    }
    speaker = turn[tags.role_tag]
    others = {key: turn[key] for key in turn if key not in (tags.role_tag, tags.content_tag)}
    return {**others, "from": names.get(speaker, speaker), "value": turn.get(tags.content_tag)}
