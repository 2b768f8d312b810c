"""The members screen: the newest versions, how to join, and what leaves a contributor's machine."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from sqlalchemy import func, select

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.registries import TUNING
from gym_fed.core.text import readable_bytes
from gym_fed.web.app import Looking
from gym_server.accounts.invitations import install_lines, needs_wheel, open_link
from gym_server.store.tables import updates
from gym_server.web.hub_view import HubView
from gym_server.web.model import page_of_versions
from gym_server.web.rounds import losses_by_version

NUM_VERSIONS = 5
"""Number of newest versions on the screen."""


def routes(view: HubView, fingerprint: str) -> APIRouter:
    """Return the route ``members``."""
    found = APIRouter()

    @found.get("/members")
    def members(visitor: Looking) -> dict[str, Any]:
        """Return all of the screen: losses, the newest versions, how to join, and what leaves a contributor's machine.

        One response, since a page of a website should open with few requests.
        """
        with view.state.database.reading() as tx:
            largest = (
                None if view.is_sealed_from(visitor) else tx.scalar(select(func.max(updates.c.delta_bytes)))
            )
            losses, _ = losses_by_version(tx)
        pages = view.config.dashboard
        return {
            "name": view.config.name,
            "enrolment": view.config.enrolment.policy,
            "install": install_lines(view.config),
            "needs_wheel": needs_wheel(view.config),
            "link": open_link(view.config, view.state.folder, fingerprint),
            "fingerprint": fingerprint,
            "public_url": None if pages is None else pages.public_url,
            "leaves": leaving(view.config, largest),
            "stays": staying(view.config),
            "is_measured": view.is_measured,
            "losses": [[height, after] for height, _, after in losses],
            "model": page_of_versions(view, visitor, 0, NUM_VERSIONS),
        }

    return found


def leaving(config: ServerConfig, largest_bytes: int | None) -> list[str]:
    """Describe what leaves a contributor's machine.

    Args:
        config: The hub's config.
        largest_bytes: The size of the largest update so far; None if there is none, or it is not shown.
    """
    secure, local = config.secure_aggregation, config.recipe.privacy
    size = f", so far at most {readable_bytes(largest_bytes)}" if largest_bytes else ""
    if secure is not None:
        update = f"masked votes in each round{size}: the hub reads only the sum of {secure.threshold} or more"
    elif TUNING.type_of(config.recipe.finetuning).sends_factors:
        update = f"a compressed LoRA update in each round{size}"
    else:
        update = f"a compressed update of the weights in each round{size}"
    is_quiet = secure is not None or local is not None
    counts = "without loss, row and token counts" if is_quiet else "with loss, time, row and token counts"
    audit, seeding = config.rounds.audit, config.seeding
    return [
        "your public key, and the name that you choose",
        update,
        *(
            [f"noise is added on your machine: multiplier {local.noise_multiplier:g}, by DP-SGD"]
            if local
            else []
        ),
        f"a signed manifest of the update, {counts}",
        *([f"audits: {audit.in_words()}"] if audit else []),
        *(["your address, to other contributors, if your own policy allows seeding"] if seeding else []),
    ]


def staying(config: ServerConfig) -> str:
    """Describe what never leaves a contributor's machine."""
    if config.rounds.audit is None:
        return "your data and your private key"
    return "your private key, and your data except in an answer to an audit"
