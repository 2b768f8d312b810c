"""Security checks of a hub's folder for `gym doctor --security`: addresses, certificate, database password, invites."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

from gym_fed.config.hub.server import CONFIG_NAME, ServerConfig
from gym_fed.config.schema.endpoint import Endpoint
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import GymError
from gym_fed.core.text import counted, plain
from gym_fed.doctor.check import Finding, Level
from gym_fed.trust.identity.tls import validity

SOON = timedelta(days=14)
LONG_INVITE = timedelta(days=30)
_DAY_SECONDS = 86400.0


def hub_findings(folder: Path) -> Iterator[Finding]:
    """Check a hub's config, certificate and database, without writing or locking anything."""
    path = folder / CONFIG_NAME
    try:
        config = load_config(path, ServerConfig)
    except GymError as error:
        yield Finding(
            "hub", Level.FAIL, plain(error.message, 400), f"fix {path}; gym-server run reports each error"
        )
        return
    yield judge_listen(config)
    if config.dashboard is not None:
        yield judge_dashboard(config.dashboard.listen, config.dashboard.public)
    yield judge_certificate(folder / "keys" / "tls.crt", datetime.now(UTC))
    yield judge_database(path, config.storage.database)
    if config.storage.database.startswith("sqlite:///"):
        yield judge_invites(folder / config.storage.database.removeprefix("sqlite:///"), time.time())
    else:
        yield Finding(
            "invites", Level.OK, "not checked: the database is not SQLite; see gym-server invites list"
        )


def judge_listen(config: ServerConfig) -> Finding:
    """Check the hub's address and enrolment policy. Except on loopback, the hub always uses TLS."""
    policy = config.enrolment.policy
    seen = f"{config.listen}, TLS with the hub's key, enrolment: {policy}"
    if policy == "open" and not Endpoint.parse(config.listen, least_port=0).is_loopback:
        remedy = "set enrolment: {policy: invite}, unless anybody may contribute (docs/security.md)"
        return Finding("listen: hub", Level.WARN, f"{seen}: anybody who can reach it can enrol", remedy)
    return Finding("listen: hub", Level.OK, seen)


def judge_dashboard(listen: str, public: bool) -> Finding:
    """Check the dashboard's address, and whether its pages require a key."""
    if public and not Endpoint.parse(listen, least_port=0).is_loopback:
        remedy = "set dashboard: {public: false}, unless anybody may see the rounds"
        return Finding("listen: dashboard", Level.WARN, f"{listen}: readable without a key", remedy)
    return Finding(
        "listen: dashboard", Level.OK, f"{listen}, {'readable without a key' if public else 'requires a key'}"
    )


def judge_certificate(path: Path, now: datetime) -> Finding:
    """Check the validity period of the certificate that the hub serves."""
    remedy = "get a new one: gym-server certificate (docs/hub-on-the-internet.md)"
    try:
        begin, end = validity(path.read_bytes())
    except (OSError, GymError) as error:
        reason = error.message if isinstance(error, GymError) else error.strerror
        return Finding("certificate", Level.FAIL, f"{path}: {plain(reason, 200)}", remedy)
    if now < begin:
        return Finding("certificate", Level.FAIL, f"{path}: not valid before {begin:%Y-%m-%d}", remedy)
    if now > end:
        return Finding("certificate", Level.FAIL, f"{path}: expired on {end:%Y-%m-%d}", remedy)
    if end - now < SOON:
        return Finding("certificate", Level.WARN, f"{path}: expires on {end:%Y-%m-%d}", remedy)
    return Finding("certificate", Level.OK, f"{path}: valid until {end:%Y-%m-%d}")


def judge_database(config: Path, url: str) -> Finding:
    """Check for a password in the database URL, which is in every copy of the config. Findings never contain it."""
    if urlsplit(url).password is None and "password=" not in url:
        return Finding("database", Level.OK, "no password in the config")
    mode = config.stat().st_mode
    remedy = f"move the password to a file with mode 0600, named by PGPASSFILE; chmod 600 {config}"
    if mode & 0o077:
        seen = f"{config}: storage.database contains a password, and other users can read the file"
        return Finding("database", Level.FAIL, seen, remedy)
    return Finding("database", Level.WARN, f"{config}: storage.database contains a password", remedy)


def judge_invites(database: Path, now: float) -> Finding:
    """Check how long unused invites stay valid; until they expire, anybody who has one can enrol."""
    remedy = "cancel invites that are no longer needed: gym-server invites cancel"
    try:
        if not database.is_file():
            return Finding("invites", Level.OK, "no database yet")
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute(
                "SELECT expires_at FROM invites WHERE used_by IS NULL AND expires_at > ?", (now,)
            ).fetchall()
    except sqlite3.Error as error:
        return Finding("invites", Level.WARN, f"{database}: {plain(error, 200)}", "gym-server invites list")
    latest = max((float(row[0]) for row in rows), default=now)
    seen = counted(len(rows), "unused invite") + (
        f", the last one expires in {(latest - now) / _DAY_SECONDS:.0f} days" if rows else ""
    )
    if latest - now > LONG_INVITE.total_seconds():
        return Finding("invites", Level.WARN, seen, remedy)
    return Finding("invites", Level.OK, seen)
