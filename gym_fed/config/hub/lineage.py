"""The chain of global versions: each one's digest names the version before it, the soup, and the round that made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.canonical import canonical_digest

if TYPE_CHECKING:
    from gym_fed.config.hub.task import SoupReference, TaskSpec

_MAX_SEARCH = 100_000


def next_digest(parent: str, soup_sha256: str, server_round: int) -> str:
    """Digest of the version that a soup leads to: a chain, so it names every soup before it."""
    return "sha256:" + canonical_digest({"parent": parent, "soup": soup_sha256, "server_round": server_round})


def check_lineage(spec: TaskSpec) -> None:
    """Whether every version of a task follows from the base by the soups that the task names.

    A reference without a round was made by gym-fed 0.1, in a task that an upgraded hub still had in its database; the
    round is then found by trying those that are possible.

    Raises:
        GymError: ``BASE_MISMATCH`` naming the first version that does not follow.
    """
    parent, last_round, tries = spec.base_digest, 0, _MAX_SEARCH
    for height, soup in enumerate(spec.soups, 1):
        rounds: Sequence[int]
        if soup.server_round is not None:
            rounds = (soup.server_round,)
        else:
            rounds = range(last_round + 1, min(spec.server_round, last_round + 1 + tries))
            tries -= len(rounds)
        made_in = next((r for r in rounds if _follows(soup, parent, r, last_round, spec.server_round)), None)
        if made_in is None:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"version {height} of the task ({soup.version_digest}) does not follow from the one before it and soup "
                f"{soup.sha256[:16]}...",
                "the hub names versions that its own soups do not make: ask its coordinator for `gym-server ledger "
                "verify`",
            )
        parent, last_round = soup.version_digest, made_in


def _follows(soup: SoupReference, parent: str, made_in: int, after: int, before: int) -> bool:
    return after < made_in < before and next_digest(parent, soup.sha256, made_in) == soup.version_digest
