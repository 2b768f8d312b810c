"""Check the recorded window of a version, using only the ledger and the signed manifests.

The result of a continuous round depends on which updates are weighed and how old they are. Without this check, a hub
that leaves out accounts or invents ages would pass a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_fed.trust.ledger.entries import Entry

_STATUS = {"enrolled": True, "rebound": True, "left": False, "revoked": False}
"""Kinds of ledger entries that change an account's status; True if the account is active afterwards."""


def require_window(
    entries: Iterable[Entry], server_round: int, manifest_of: Callable[[str], UpdateManifest]
) -> None:
    """Check the recorded window of a continuous round; other rounds have none.

    An account may be left out if it was inactive, or if it left, was revoked or rejoined after its last merged update.

    Args:
        entries: The verified ledger.
        server_round: Number of a committed round.
        manifest_of: Returns the verified manifest of an update.

    Raises:
        GymError: ``STATE_CORRUPT`` for a wrong update, version or age, or a wrong list of the other updates.
    """
    versions: dict[str, Entry] = {}
    changed: dict[str, tuple[int, bool]] = {}
    recorded: dict[str, Any] = {}
    for entry in entries:
        if entry.kind == "version":
            if entry.body["server_round"] == server_round:
                recorded = entry.body
                break
            versions[entry.body["digest"]] = entry
        elif entry.kind in _STATUS:
            changed[entry.body["contributor"]] = (entry.sequence, _STATUS[entry.kind])
    if "window" not in recorded:
        return
    window, merged = recorded["window"], recorded["merged"]
    lineage = _lineage(versions, recorded["parent"])
    if [weighed["update"] for weighed in window["updates"]] != merged:
        raise _wrong(server_round, "lists different updates from the version")
    for weighed in window["updates"]:
        base = manifest_of(weighed["update"]).base_digest
        if base != weighed["version"] or base not in lineage or lineage.index(base) != weighed["staleness"]:
            raise _wrong(server_round, f"has a wrong version or age for update {weighed['update'][:12]}")
    own = {manifest_of(update_id).contributor for update_id in merged}
    latest: dict[str, tuple[int, str]] = {}
    for digest in lineage[: window["max_staleness"]]:
        if digest not in versions:  # the base
            break
        for update_id in versions[digest].body["merged"]:
            who = manifest_of(update_id).contributor
            if who not in own:
                latest.setdefault(who, (versions[digest].sequence, update_id))
    required = {
        update_id
        for who, (merged_at, update_id) in latest.items()
        if who not in changed or (changed[who][1] and changed[who][0] < merged_at)
    }
    others, possible = window["others"], {update_id for _, update_id in latest.values()}
    if others != sorted(set(others) & possible) or not required <= set(others):
        raise _wrong(server_round, "does not list the latest update of every other account")


def _lineage(versions: dict[str, Entry], digest: str) -> list[str]:
    """Return the digests of a version and its ancestors, newest first; the base is last."""
    digests = [digest]
    while digest in versions:
        digest = versions[digest].body["parent"]
        digests.append(digest)
    return digests


def _wrong(server_round: int, what: str) -> GymError:
    return GymError(
        ErrorCode.STATE_CORRUPT,
        f"round {server_round}: the window that the ledger records {what}",
        "the hub did not weight the updates by its rules",
    )
