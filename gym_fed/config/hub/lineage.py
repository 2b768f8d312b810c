"""The chain of global versions: each one's digest names the version before it, the soup, and the round that made it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest

if TYPE_CHECKING:
    from gym_fed.config.hub.task import TaskSpec


def next_digest(parent: str, soup_sha256: str, server_round: int) -> str:
    """Return the digest of the version that a soup leads to: a chain, so it names every soup before it."""
    return "sha256:" + canonical_digest({"parent": parent, "soup": soup_sha256, "server_round": server_round})


def check_lineage(spec: TaskSpec) -> None:
    """Refuse a task whose versions do not follow from the base by the soups that it names.

    Raises:
        GymError: ``BASE_MISMATCH`` naming the first version that does not follow.
    """
    parent, last_round = spec.base_digest, 0
    for height, soup in enumerate(spec.soups, 1):
        digest = next_digest(parent, soup.sha256, soup.server_round)
        if not last_round < soup.server_round < spec.server_round or digest != soup.version_digest:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"version {height} of the task ({soup.version_digest}) does not follow from the one before it and soup "
                f"{soup.sha256[:16]}...",
                "the hub names versions that its own soups do not make: ask its coordinator for `gym-server ledger "
                "verify`",
            )
        parent, last_round = soup.version_digest, soup.server_round
