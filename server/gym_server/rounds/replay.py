"""Replay a round: recompute its soup or scores from stored objects, and compare them with the ledger.

The merged updates and the recipe are read from the signed ledger, not from the hub's tables. Every object must hash to
its name, every manifest to its id in the ledger, and the server's own state to its digest in the entry of the previous
version.
"""

from __future__ import annotations

import functools
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from sqlalchemy import select

from gym_fed.config.hub.sections import StorageConfig
from gym_fed.config.hub.server import CONFIG_NAME, ServerConfig
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.config.hub.task import TaskSpec
from gym_fed.config.schema.plugins import read_records, require_plugins
from gym_fed.config.yaml.file import validate
from gym_fed.config.yaml.strict import parse_config, read_config_text
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256
from gym_fed.delta.base import BaseSpec
from gym_fed.soup.private import PrivateMerge
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_server.ledger.chain import Ledger
from gym_server.ledger.rows import entry_of
from gym_server.privacy import merge as private_merge
from gym_server.privacy.secure_unmask import SecureSum, secure_sum
from gym_server.rewards.scores import score_updates
from gym_server.rounds.continuous import WindowUpdates
from gym_server.rounds.evidence import LengthEvidence
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.soups import Ingredients, make_soup, state_files
from gym_server.rounds.sums import sum_after
from gym_server.rounds.window_check import require_window
from gym_server.state import HubState
from gym_server.store.database import Database
from gym_server.store.tables import ledger as entries
from gym_server.store.tables import rounds, updates


def replay(state: HubState, server_round: int) -> dict[str, Any]:
    """Recompute the soup of a committed round, and the version's integer sum if it has one.

    Returns:
        ``server_round``, ``version``, ``aggregator``, ``updates`` (their number), ``soup`` (the committed digest) and
        ``replayed`` (the recomputed digest). The last two may differ if the version has an integer sum, because the
        compressed bytes of equal integers depend on the machine's zlib. Both soups then give the ledger's sum, and
        ``same_integers`` is True.

    Raises:
        GymError: ``NOT_FOUND`` for a round without a version; ``STATE_CORRUPT`` if the ledger, an object or a manifest
            was changed, or if the digests differ; ``MISSING_DEPENDENCY`` naming a plug-in of the round that is missing
            or has a different version.
    """
    ingredients = ingredients_of(state, server_round)
    recorded = _version_entry(state.ledger, "server_round", server_round)
    integers = recorded["integers"]["digest"] if "integers" in recorded else None
    with tempfile.TemporaryDirectory(dir=state.folder / "staging", prefix="replay-") as folder:
        soup = make_soup(state, ingredients, Path(folder) / "soup.gymdelta")
        found, total = soup.report.sha256, _sum_digest(state, ingredients, soup.path)
    if found != recorded["soup"]:
        if total is None or total != integers:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"round {server_round}: the ledger records soup {recorded['soup']}, but its updates give {found}",
                "the soup or the server's own state was changed later, or another release of gym-fed made the soup",
            )
        stored = state.store.local_path(recorded["soup"])
        _require_intact(stored, recorded["soup"])
        total = _sum_digest(state, ingredients, stored)
    if total != integers:
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"round {server_round}: the ledger records the sum {integers}, but its soups give {total}",
            "contributors that joined with this sum have a model that differs from the soups",
        )
    return {
        "server_round": server_round,
        "version": recorded["height"],
        "aggregator": ingredients.recipe.aggregator,
        "updates": len(ingredients.manifests),
        "soup": recorded["soup"],
        "replayed": found,
        **({} if integers is None else {"same_integers": True}),
    }


def _sum_digest(state: HubState, ingredients: Ingredients, soup: Path) -> str | None:
    total = sum_after(state, ingredients, soup)
    return None if total is None else total.digest()


def rescore(state: HubState, config: ServerConfig, server_round: int) -> dict[str, Any]:
    """Score the updates of a round again by the recorded method, on the held-out set of the current config.

    Returns:
        ``server_round``, ``method``, ``evaluations``, ``same``, and ``scores``, which has the recorded and the new
        score of each update.

    Raises:
        GymError: ``NOT_FOUND`` if the ledger has no scores of the round; ``CONFIG_INVALID`` if there is no held-out
            data; ``STATE_CORRUPT`` as in ``replay``.
    """
    recorded = next(
        (
            e.body
            for e in state.ledger.entries()
            if e.kind == "contribution" and e.body["server_round"] == server_round
        ),
        None,
    )
    if recorded is None or "options" not in recorded:
        raise GymError(
            ErrorCode.NOT_FOUND,
            f"the ledger has no scores of round {server_round} that can be measured again",
            "participation has no scores, and scores by improvement are in the verdicts",
        )
    if config.gate.heldout is None:
        raise GymError(ErrorCode.CONFIG_INVALID, "scores are measured on held-out data", "set gate.heldout")
    ingredients = ingredients_of(state, server_round)
    model = HubModel.of(state, config)
    model.follow(state.round_store.soups(ingredients.parent.height) if ingredients.parent.height else [])
    with tempfile.TemporaryDirectory(dir=state.folder / "staging", prefix="rescore-") as folder:
        report = make_soup(state, ingredients, Path(folder) / "soup.gymdelta").report
    update_ids = [manifest.digest for manifest in ingredients.manifests]
    with state.database.reading() as tx:
        rows = {
            r.update_id: r for r in tx.execute(select(updates).where(updates.c.update_id.in_(update_ids)))
        }
    found = score_updates(
        state.store,
        model,
        [rows[update_id] for update_id in update_ids],
        report.coefficients,
        ingredients.weights,
        recipe=ingredients.recipe,
        method=recorded["method"],
        options=recorded["options"],
    )
    pairs = {update_id: [recorded["scores"][update_id], found.scores[update_id]] for update_id in update_ids}
    return {
        "server_round": server_round,
        "method": recorded["method"],
        "evaluations": found.measurement["evaluations"],
        "same": all(then == now for then, now in pairs.values()),
        "scores": pairs,
    }


def require_round_plugins(folder: Path, server_round: int) -> None:
    """Check that the plug-ins of a round are installed, before the hub's config is read.

    Reading the config would only report their names as unknown. All other errors are left to ``replay``, which reads
    the verified ledger.

    Args:
        folder: The hub's folder.
        server_round: The number of the round.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` naming plug-in, package, version and round.
    """
    path = folder.resolve() / CONFIG_NAME
    if not path.is_file():
        return
    values, marks = parse_config(path, read_config_text(path))
    storage = validate(values, _Stored, str(path), marks).storage
    with closing(Database.open(storage.database, path.parent)) as database, database.reading() as tx:
        rows = tx.execute(select(entries).where(entries.c.kind == "version")).all()
    for recorded in (entry_of(row).body for row in rows):
        if recorded["server_round"] == server_round:
            require_plugins(read_records(recorded.get("plugins", []), "the ledger"), f"round {server_round}")


class _Stored(BaseModel):
    """The part of a hub's config that locates its stored state."""

    model_config = ConfigDict(extra="ignore")

    storage: StorageConfig = StorageConfig()


def _private(base: BaseSpec, database: Database, recorded: dict[str, Any]) -> PrivateMerge | None:
    """Return the noise and clip of a round that was merged with differential privacy; None for other rounds."""
    if "privacy" not in recorded:
        return None
    with database.reading() as tx:
        spec = tx.scalar(select(rounds.c.spec).where(rounds.c.server_round == recorded["server_round"]))
    seed = private_merge.seed_of(database, recorded["privacy"]["seed_sha256"])
    return private_merge.private_round(
        recorded["privacy"], TaskSpec.model_validate_json(str(spec)), base, seed
    )


def _window(state: HubState, recorded: dict[str, Any]) -> WindowUpdates | None:
    """Return the window of a continuous round, checked against the ledger; None for other rounds."""
    if "window" not in recorded:
        return None
    manifest_of = functools.cache(functools.partial(_manifest, state.database))
    require_window(state.ledger.entries(), recorded["server_round"], manifest_of)
    return WindowUpdates.recorded(recorded["window"], manifest_of)


def _secure(state: HubState, recorded: dict[str, Any], merged: list[str]) -> SecureSum | None:
    """Recompute the sum of a secure round from the stored masked votes and the revealed shares."""
    if "secure_aggregation" not in recorded:
        return None
    own = recorded["secure_aggregation"]
    manifests = [_manifest(state.database, update_id) for update_id in merged]
    return secure_sum(state, recorded["server_round"], manifests, own["threshold"], own["step_norm"])


def ingredients_of(state: HubState, server_round: int) -> Ingredients:
    """Return the inputs of a committed round's soup, each verified.

    Raises:
        GymError: See ``replay``.
    """
    state.ledger.verify()
    recorded = _version_entry(state.ledger, "server_round", server_round)
    merged = recorded["merged"]
    if not recorded["recipe"]:
        raise GymError(
            ErrorCode.NOT_FOUND,
            f"round {server_round} took over a version of the root, which was not made from this hub's updates",
            "replay it at the root; gym-server ledger verify --root-ledger FILE checks that the version is the root's",
        )
    require_plugins(read_records(recorded.get("plugins", []), "the ledger"), f"round {server_round}")
    root = recorded["root"]
    weights = recorded.get("weights")  # weights from reputations at that time
    evidence = recorded.get("evidence")  # recorded, so that no model is needed
    ingredients = Ingredients(
        server_round=server_round,
        parent=state.round_store.version(state.round_store.version(recorded["height"]).parent),
        recipe=SoupRecipe.recorded(recorded["recipe"]),
        manifests=[_manifest(state.database, update_id) for update_id in merged],
        root=root,
        private=_private(state.base, state.database, recorded),
        secure=_secure(state, recorded, merged),
        weights=None if weights is None else [weights[update_id] for update_id in merged],
        evidence=None if evidence is None else LengthEvidence.recorded(evidence, merged),
        window=_window(state, recorded),
    )
    others = [] if ingredients.window is None else ingredients.window.others
    for sha256 in [m.delta_sha256 for m in [*ingredients.manifests, *others]] + ([root] if root else []):
        _require_intact(state.store.local_path(sha256), sha256)
    _require_state(state.folder, state.ledger, ingredients)
    return ingredients


def _version_entry(ledger: Ledger, key: str, number: int) -> dict[str, Any]:
    """Return the ledger's entry for the version with this ``server_round`` or ``height``."""
    for entry in ledger.entries():
        if entry.kind == "version" and entry.body[key] == number:
            return entry.body
    raise GymError(
        ErrorCode.NOT_FOUND,
        f"round {number} has no version" if key == "server_round" else f"there is no version {number}",
        "gym-server rounds lists the rounds that were committed",
    )


def _require_state(folder: Path, ledger: Ledger, ingredients: Ingredients) -> None:
    """Check the server's state files after the parent version against the ledger."""
    parent = ingredients.parent
    recorded = _version_entry(ledger, "height", parent.height)["state"] if parent.height else {}
    for kind, path in state_files(folder, ingredients.recipe, parent).items():
        found = file_sha256(path) if path.exists() else None
        if found != recorded.get(kind):
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"the server's {kind} after round {parent.server_round}, {path}, has sha256 {found or 'none'}; "
                f"the ledger says {recorded.get(kind) or 'that there is none'}",
                "restore the hub's folder from a backup",
            )


def _manifest(database: Database, update_id: str) -> UpdateManifest:
    with database.reading() as tx:
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
            f"object {sha256} does not match its sha256",
            "restore the hub's folder from a backup",
        )
