"""Make a committed soup again, from the stored objects and what the ledger says, and compare the digests.

Nothing that the hub believes is taken over: which updates were merged and by which recipe is read from the signed
ledger, every object must hash to its name, and every manifest to the id under which the ledger knows it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from sqlalchemy import select

from gym_fed.config.soup import SoupRecipe
from gym_fed.errors import ErrorCode, GymError
from gym_fed.identity.manifest import UpdateManifest
from gym_server.federation import Federation
from gym_server.soups import Ingredients, make_soup
from gym_server.store.objects import file_sha256
from gym_server.store.tables import updates


def replay(fed: Federation, server_round: int) -> dict[str, Any]:
    """Make the soup of a committed round again.

    Returns:
        ``server_round``, ``version``, ``aggregator``, ``updates`` (how many), ``soup`` (as committed) and ``replayed``;
        the last two are equal.

    Raises:
        GymError: ``NOT_FOUND`` for a round that no version came of; ``STATE_CORRUPT`` when the ledger, an object or a
            manifest is not what it was, or when the digests differ.
    """
    fed.ledger.verify()
    told = _version_entry(fed, server_round)
    ingredients = Ingredients(
        server_round=server_round,
        parent=fed.journal.version(told["height"] - 1),
        recipe=SoupRecipe.model_validate(told["recipe"]),
        manifests=[_manifest(fed, update_id) for update_id in told["merged"]],
        root=told["root"],
    )
    for sha256 in [m.delta_sha256 for m in ingredients.manifests] + ([told["root"]] if told["root"] else []):
        _require_intact(fed.store.local_path(sha256), sha256)
    with tempfile.TemporaryDirectory(dir=fed.folder / "staging", prefix="replay-") as folder:
        soup = make_soup(fed, ingredients, Path(folder) / "soup.gymdelta")
    found = soup.report.sha256
    if found != told["soup"]:
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"round {server_round}: the ledger says soup {told['soup']}, its updates give {found}",
            "the soup or the server's own state was changed after the fact, or the release of gym-fed differs",
        )
    return {
        "server_round": server_round,
        "version": told["height"],
        "aggregator": ingredients.recipe.aggregator,
        "updates": len(ingredients.manifests),
        "soup": told["soup"],
        "replayed": found,
    }


def _version_entry(fed: Federation, server_round: int) -> dict[str, Any]:
    for entry in fed.ledger.entries():
        if entry.kind == "version" and entry.body["server_round"] == server_round:
            return entry.body
    raise GymError(
        ErrorCode.NOT_FOUND,
        f"no version came of round {server_round}",
        "gym-server rounds lists the rounds that were committed",
    )


def _manifest(fed: Federation, update_id: str) -> UpdateManifest:
    with fed.database.reading() as tx:
        row = tx.execute(select(updates).where(updates.c.update_id == update_id)).first()
    manifest = UpdateManifest.parse(row.manifest) if row is not None else None
    if manifest is None or manifest.digest != update_id:
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"the manifest of update {update_id[:12]} is missing or was changed",
            "restore the hub's folder from a backup",
        )
    return manifest


def _require_intact(path: Path, sha256: str) -> None:
    if file_sha256(path) != sha256:
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"object {sha256} does not hash to its name",
            "restore the hub's folder from a backup",
        )
