"""Datasets of the Hugging Face hub: from this machine's cache, else streamed; no code that comes with them is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gym_fed.data.files import Placed
from gym_fed.errors import ErrorCode, GymError


def hub_rows(
    name: str,
    *,
    subset: str | None = None,
    split: str | None = None,
    folder: str | None = None,
    files: Sequence[str] = (),
) -> Iterator[Placed]:
    """Raw rows of a hub dataset, one after the other.

    Args:
        name: ``owner/name``.
        subset: A configuration of it.
        split: ``train`` by default.
        folder: Only the files in this folder of it.
        files: Only these files of it, all of which are the split.

    Raises:
        GymError: ``UNAVAILABLE`` when it is not in the cache and the hub cannot be reached; ``NOT_FOUND`` when there is
            no such dataset, subset or split.
    """
    import datasets

    split = split or "train"
    source = cached_dataset(name)
    where = f"{name} ({subset}, {split})" if subset else f"{name} ({split})"
    remedy = f"fetch it once with: hf download --repo-type dataset {name}; or give files with path"
    try:
        stream: Any = datasets.load_dataset(
            source or name,
            name=subset,
            split=split,
            data_dir=folder,
            data_files={split: list(files)} if files else None,
            streaming=True,
        )
        if (
            stream.features
        ):  # of a JSON list nothing is known before it is read, and there is nothing to decode
            stream = stream.decode(False)
        for number, row in enumerate(stream, 1):
            yield f"{where}: row {number}", {k: v for k, v in row.items() if v is not None}
    except ConnectionError as error:
        raise GymError(
            ErrorCode.UNAVAILABLE,
            f"hub dataset {name!r} is not on this machine, and the hub cannot be reached: {_line(error)}",
            remedy,
        ) from error
    except (ValueError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        raise GymError(ErrorCode.NOT_FOUND, f"hub dataset {where}: {_line(error)}", remedy) from error


def cached_dataset(name: str) -> str | None:
    """The folder of a dataset's snapshot in the hub's cache, if it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
