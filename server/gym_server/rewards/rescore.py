"""Score a committed round again, from the stored updates and what the ledger says, and compare."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from sqlalchemy import select

from gym_fed.errors import ErrorCode, GymError
from gym_server.federation import Federation
from gym_server.global_model import GlobalModel
from gym_server.replay import ingredients_of
from gym_server.rewards.scores import score_updates
from gym_server.soups import make_soup
from gym_server.store.tables import updates


def rescore(fed: Federation, server_round: int) -> dict[str, Any]:
    """Measure the updates of a round as they were measured, on the held-out set that the config names now.

    Returns:
        ``server_round``, ``method``, ``evaluations``, ``same``, and ``scores``: by update the ledger's and the new one.

    Raises:
        GymError: ``NOT_FOUND`` for a round whose ledger has no scores; ``STATE_CORRUPT`` as ``replay``.
    """
    told = next(
        (
            e.body
            for e in fed.ledger.entries()
            if e.kind == "contribution" and e.body["server_round"] == server_round
        ),
        None,
    )
    if told is None or "options" not in told:
        raise GymError(
            ErrorCode.NOT_FOUND,
            f"the ledger has no scores of round {server_round} that could be measured again",
            "rounds by participation have none, and those by improvement are in the verdicts",
        )
    if fed.config.gate.heldout is None:
        raise GymError(ErrorCode.CONFIG_INVALID, "scores are measured on held-out data", "set gate.heldout")
    ingredients = ingredients_of(fed, server_round)
    model = GlobalModel(fed.base, fed.config.base_model, fed.store, fed.config.gate, fed.folder)
    model.follow(fed.journal.soups(ingredients.parent.height) if ingredients.parent.height else [])
    with tempfile.TemporaryDirectory(dir=fed.folder / "staging", prefix="rescore-") as folder:
        report = make_soup(fed, ingredients, Path(folder) / "soup.gymdelta").report
    wanted = [manifest.digest for manifest in ingredients.manifests]
    with fed.database.reading() as tx:
        rows = {r.update_id: r for r in tx.execute(select(updates).where(updates.c.update_id.in_(wanted)))}
    found = score_updates(
        fed,
        model,
        [rows[update_id] for update_id in wanted],
        report.coefficients,
        ingredients.weights,
        recipe=ingredients.recipe,
        method=told["method"],
        options=told["options"],
    )
    pairs = {update_id: [told["scores"][update_id], found.scores[update_id]] for update_id in wanted}
    return {
        "server_round": server_round,
        "method": told["method"],
        "evaluations": found.told["evaluations"],
        "same": all(then == now for then, now in pairs.values()),
        "scores": pairs,
    }
