"""Create, list and cancel invites for the coordinator. The hub stores only their hashes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from sqlalchemy import select, update

from gym_fed.config.hub.sections import DashboardConfig
from gym_fed.config.hub.server import CONFIG_NAME, ServerConfig
from gym_fed.config.schema.endpoint import Endpoint
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.trust.identity.login import Invite, format_invite, token_hash
from gym_fed.version import __version__
from gym_server.accounts.accounts import Accounts
from gym_server.clock import HubClock
from gym_server.store.database import Database
from gym_server.store.tables import invites

MAX_NOTE = 200
"""Maximum length of an invite's note, in characters."""

_INSTALL_WHEEL = "pip install WHEEL"
_ID_DIGITS = 12
_DAY_SECONDS = 86_400
_CANCELLED = 0.0
"""``expires_at`` of a cancelled invite."""


def make_invites(
    config: ServerConfig,
    folder: Path,
    accounts: Accounts,
    fingerprint: str,
    notes: Sequence[str],
    valid_seconds: float,
) -> list[dict[str, str]]:
    """Create one single-use invite per note.

    Returns:
        ``id`` on this hub, ``note``, ``invite`` (the link) and ``message`` (to send to a person) of every invite.

    Raises:
        GymError: ``CONFIG_INVALID`` if other machines cannot connect to the address in the invites.
    """
    where, made = address_for_others(config, folder), []
    for note in notes:
        note = plain(note, MAX_NOTE)
        token = accounts.invite(note, valid_seconds)
        link = format_invite(Invite(where.host, where.port, fingerprint, token))
        message = invite_message(config, link, valid_seconds)
        made.append({"id": token_hash(token)[:_ID_DIGITS], "note": note, "invite": link, "message": message})
    return made


def open_link(config: ServerConfig, folder: Path, fingerprint: str) -> str | None:
    """Return the join link of an open hub; None if the hub requires invites or has no public address."""
    if config.enrolment.policy != "open":
        return None
    try:
        where = address_for_others(config, folder)
    except GymError:
        return None
    return format_invite(Invite(where.host, where.port, fingerprint, ""))


def install_lines(config: ServerConfig) -> list[str]:
    """Return the two commands that install the client and open its page."""
    return [(config.dashboard or DashboardConfig()).install or _install_command(), "gym-client ui"]


def needs_wheel(config: ServerConfig) -> bool:
    """Return True if the coordinator must send the wheel along, since no package index has this hub's gym-fed."""
    return install_lines(config)[0] == _INSTALL_WHEEL


def _install_command() -> str:
    """Return the command that installs gym-fed from where this hub's came; PEP 610 records a file or a checkout."""
    installed = [one for one in metadata.distributions(name="gym-fed") if one.read_text("RECORD") is not None]
    is_indexed = bool(installed) and all(one.read_text("direct_url.json") is None for one in installed)
    return "pip install gym-fed" if is_indexed else _INSTALL_WHEEL


def invite_message(config: ServerConfig, link: str, valid_seconds: float) -> str:
    """Return an invite message that explains how to install the client, join, leave and uninstall.

    Args:
        config: The hub's config.
        link: The invite.
        valid_seconds: Time for which the invite is valid.
    """
    pages = config.dashboard and config.dashboard.public_url
    install, page = install_lines(config)
    steps = (
        ("install", f"{install} (the file sent with this message)" if needs_wheel(config) else install),
        ("join", f"{page} (paste the link below there), or"),
        ("", "gym-client join --invite LINK --data FILE"),
        ("leave", "gym-client leave"),
        ("uninstall", "gym-client uninstall, then pip uninstall gym-fed"),
    )
    lines = [
        f"You are invited to improve the model of {plain(config.name)} with us. Your data stays on your machine.",
        *([f"What we have made so far: {pages}"] if pages else []),
        "",
        *(f"    {what:<11}{how}" for what, how in steps),
        "",
        f"The hub has gym-fed {__version__}. The link works once, within {span_in_words(valid_seconds)}:",
        link,
    ]
    return "\n".join(lines)


def span_in_words(seconds: float) -> str:
    """Return the time for which an invite is valid, such as ``7 days`` or ``24 h``."""
    days = seconds / _DAY_SECONDS
    return f"{days:g} days" if days >= 2 else f"{days * 24:g} h"


def address_for_others(config: ServerConfig, folder: Path) -> Endpoint:
    """Return the address in invites: ``advertise``, else ``listen``.

    Raises:
        GymError: ``CONFIG_INVALID`` if others cannot connect to that address.
    """
    if config.advertise is not None:
        return Endpoint.parse(config.advertise)
    where = Endpoint.parse(config.listen, least_port=0)
    if where.is_everywhere or not where.port:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"an invite contains the hub's address, but nobody can connect to listen: {config.listen}",
            f"set advertise: HOST:PORT in {folder / CONFIG_NAME}, the address where contributors reach this hub",
        )
    return where


def invites_of(
    database: Database, clock: HubClock, offset: int = 0, most: int | None = None
) -> list[dict[str, Any]]:
    """Return invites, newest first; ``state`` is open, used, expired or cancelled.

    Args:
        database: The hub's database.
        clock: The hub's clock.
        offset: Number of the newest invites to skip.
        most: Maximum number of invites; None returns all.
    """
    now = clock.now()
    newest = select(invites).order_by(invites.c.created_at.desc(), invites.c.token_hash)
    with database.reading() as tx:
        rows = tx.execute(newest.offset(offset).limit(most)).all()
    return [
        {
            "id": row.token_hash[:_ID_DIGITS],
            "note": row.note,
            "state": _state(row, now),
            "created_at": row.created_at,
            "expires_at": row.expires_at or None,
            "used_by": row.used_by,
        }
        for row in rows
    ]


def cancel_invites(database: Database, clock: HubClock, ids: list[str]) -> list[str]:
    """Cancel unused invites, all or none of them, and return their ids.

    Raises:
        GymError: ``NOT_FOUND`` if an id does not belong to an open invite.
    """
    found = {one["id"]: one["state"] for one in invites_of(database, clock)}
    for one in ids:
        if found.get(one) != "open":
            shown = repr(plain(one, 80))
            problem = f"invite {shown} is {found[one]}" if one in found else f"there is no invite {shown}"
            raise GymError(ErrorCode.NOT_FOUND, problem, "gym-server invites list shows the open invites")
    with database.transaction() as tx:
        for one in ids:
            mine = invites.c.token_hash.startswith(one, autoescape=True) & invites.c.used_by.is_(None)
            tx.execute(update(invites).where(mine).values(expires_at=_CANCELLED))
    return ids


def _state(row: Any, now: float) -> str:
    if row.used_by is not None:
        return "used"
    if row.expires_at == _CANCELLED:
        return "cancelled"
    return "open" if row.expires_at > now else "expired"
