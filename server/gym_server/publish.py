"""A global version as an ordinary model folder: the base with the committed soups applied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import select

from gym_fed.delta.base import tensors_digest
from gym_fed.errors import ErrorCode, GymError
from gym_fed.models import resolve
from gym_fed.text import plain
from gym_server.federation import Federation
from gym_server.global_model import GlobalModel
from gym_server.store.tables import published

DTYPES = ("float32", "bfloat16", "float16")


def write_version(
    fed: Federation, output: Path, height: int | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """Write version ``height`` (the newest by default) with its tokenizer to a new folder.

    The digest of its tensors is noted, so that the hub knows variants that are made on the folder.

    Args:
        fed: The hub.
        output: A new folder.
        height: Of the version.
        dtype: What the weights are rounded to; None: that of the base's own files. Versions are kept in float32.

    Raises:
        GymError: ``FILE_EXISTS`` for a folder that is not empty, ``NOT_FOUND`` for a version that does not exist,
            ``USAGE`` for an unknown dtype.
    """
    if dtype is not None and dtype not in DTYPES:
        raise GymError(
            ErrorCode.USAGE, f"dtype {plain(dtype, 40)!r} is unknown", f"one of {', '.join(DTYPES)}"
        )
    head = fed.journal.head()
    wanted = head.height if height is None else height
    if not 0 <= wanted <= head.height:
        raise GymError(
            ErrorCode.NOT_FOUND, f"there is no version {wanted}", f"versions 0 to {head.height} exist"
        )
    if output.exists() and any(output.iterdir()):
        raise GymError(ErrorCode.FILE_EXISTS, f"{output} is not empty", "name a new folder")
    model = GlobalModel(fed.base, fed.config.base_model, fed.store, fed.config.gate, fed.folder)
    model.follow(fed.journal.soups(wanted))
    written = dtype or dtype_of(fed.config.base_model)
    model.model.to(getattr(torch, written)).save_pretrained(output)
    model.tokenizer.save_pretrained(output)
    tensors = tensors_digest(
        model.model.float()
    )  # as it is found when the folder is loaded, which is in float32
    with fed.database.transaction() as tx:
        if tx.scalar(select(published.c.height).where(published.c.digest == tensors)) is None:
            tx.execute(published.insert().values(digest=tensors, height=wanted))
    return {
        "height": wanted,
        "digest": model.digest,
        "base_digest": tensors,
        "base_model": fed.public_base_name,
        "dtype": written,
        "folder": str(output),
    }


def dtype_of(base_model: str) -> str:
    """The dtype that a model folder's config names; ``float32`` where it names none of those that are written here."""
    try:
        config = json.loads((Path(resolve(base_model)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "float32"
    found = config.get("dtype") or config.get("torch_dtype")
    return found if found in DTYPES else "float32"
