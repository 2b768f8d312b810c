"""A global version as an ordinary model folder: the base with the committed soups applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.errors import ErrorCode, GymError
from gym_server.federation import Federation
from gym_server.global_model import GlobalModel


def write_version(fed: Federation, output: Path, height: int | None = None) -> dict[str, Any]:
    """Write version ``height`` (the newest by default) with its tokenizer to a new folder.

    Raises:
        GymError: ``FILE_EXISTS`` for a folder that is not empty, ``NOT_FOUND`` for a version that does not exist.
    """
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
    model.model.save_pretrained(output)
    model.tokenizer.save_pretrained(output)
    return {
        "height": wanted,
        "digest": model.digest,
        "base_model": fed.public_base_name,
        "folder": str(output),
    }
