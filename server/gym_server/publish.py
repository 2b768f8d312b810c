"""A global version as an ordinary model folder: the base with the committed soups applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import select

from gym_fed.delta import tensors_digest
from gym_fed.errors import ErrorCode, GymError
from gym_server.federation import Federation
from gym_server.global_model import GlobalModel
from gym_server.store.tables import published


def write_version(fed: Federation, output: Path, height: int | None = None) -> dict[str, Any]:
    """Write version ``height`` (the newest by default) with its tokenizer to a new folder.

    The digest of its tensors is noted, so that the hub knows variants that are made on the folder.

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
    tensors = tensors_digest(model.model)
    with fed.database.transaction() as tx:
        if tx.scalar(select(published.c.height).where(published.c.digest == tensors)) is None:
            tx.execute(published.insert().values(digest=tensors, height=wanted))
    return {
        "height": wanted,
        "digest": model.digest,
        "base_digest": tensors,
        "base_model": fed.public_base_name,
        "folder": str(output),
    }
