"""Security checks of `gym doctor --security`: key and secret files, vulnerable packages, and a hub's configuration."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from importlib import metadata
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from packaging.version import Version

from gym_fed.config.hub.server import CONFIG_NAME, ServerConfig
from gym_fed.config.schema.endpoint import Endpoint
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import GymError
from gym_fed.core.text import counted, plain
from gym_fed.doctor.check import Finding, Level
from gym_fed.trust.identity.tls import validity

MINIMUMS = {
    "aiohttp": ("3.12.14", "CVE-2025-53643"),
    "cryptography": ("44.0.1", "CVE-2024-12797"),
    "gradio": ("5.11.0", "CVE-2025-23042"),
    "h11": ("0.16.0", "CVE-2025-43859"),
    "jinja2": ("3.1.6", "CVE-2025-27516"),
    "pillow": ("11.3.0", "CVE-2025-48379"),
    "protobuf": ("6.31.1", "CVE-2025-4565"),
    "pyarrow": ("14.0.1", "CVE-2023-47248"),
    "pyyaml": ("5.4", "CVE-2020-14343"),
    "requests": ("2.32.4", "CVE-2024-47081"),
    "starlette": ("0.49.1", "CVE-2025-62727"),
    "torch": ("2.6.0", "CVE-2025-32434"),
    "transformers": ("4.53.0", "CVE-2025-3933"),
    "urllib3": ("2.6.0", "CVE-2025-66418"),
}
"""First release that fixes a known serious vulnerability, and its advisory, by package.

`make audit` checks every pinned package against PyPI's advisories.
"""

MAX_KEYS = 1000
SOON = timedelta(days=14)
LONG_INVITE = timedelta(days=30)
_DAY_SECONDS = 86400.0
_PRIVATE = b"PRIVATE KEY-----"


def security_findings(home: Path, hub: Path) -> list[Finding]:
    """Run every security check.

    Args:
        home: The contributor's home folder; it may be missing.
        hub: The folder of a hub; without a ``gym-server.yaml`` in it, no hub is checked.
    """
    if os.name == "nt":
        files = [Finding("files", Level.OK, "not checked: Windows has no file modes")]
    else:
        files = [*home_findings(home), *key_findings(hub / "keys", "hub"), *secret_findings(hub)]
    network = hub_findings(hub) if (hub / CONFIG_NAME).is_file() else [no_hub(hub)]
    return [*files, *network, *version_findings()]


def home_findings(home: Path) -> Iterator[Finding]:
    """Check the modes of a contributor's home and of the keys in it."""
    if not home.is_dir():
        yield Finding("home", Level.OK, f"{home} does not exist; it will be created with mode 0700")
        return
    mode = stat.S_IMODE(home.stat().st_mode)
    remedy = f"chmod 700 {home}"
    if mode & 0o022:
        yield Finding("home", Level.FAIL, f"{home}: mode {mode:04o}, other users can write", remedy)
    elif mode & 0o077:
        yield Finding("home", Level.WARN, f"{home}: mode {mode:04o}, other users can access it", remedy)
    else:
        yield Finding("home", Level.OK, f"{home}: mode {mode:04o}")
    yield from key_findings(home, "home")
    yield from key_findings(home / "keys", "home")


def key_findings(folder: Path, owner: str) -> Iterator[Finding]:
    """Check that private keys have mode 0600, even in a folder that is closed to others: a key may be moved."""
    if not folder.is_dir():
        return
    for path in islice(sorted(folder.iterdir()), MAX_KEYS):
        if path.suffix not in {".pem", ".key"} or not path.is_file() or not _is_secret(path):
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        name = f"key: {owner}"
        if mode & 0o077:
            yield Finding(
                name,
                Level.FAIL,
                f"{path}: mode {mode:04o}, other users can use it",
                f"chmod 600 {path}; if others have an account on this machine, replace the key (docs/keys.md)",
            )
        else:
            yield Finding(name, Level.OK, f"{path}: mode {mode:04o}")


def secret_findings(folder: Path) -> Iterator[Finding]:
    """Check the modes of files with tokens and passwords, if they exist."""
    user = Path.home()
    tokens = Path(os.environ.get("HF_HOME") or user / ".cache" / "huggingface")
    places = [
        Path(os.environ.get("HF_TOKEN_PATH") or tokens / "token"),
        Path(os.environ.get("PGPASSFILE") or user / ".pgpass"),
        user / ".netrc",
        user / ".aws" / "credentials",
        folder / ".env",
        folder / "keys.json",
        folder / "hub.db",
    ]
    for path in dict.fromkeys(places):
        if not path.is_file():
            continue
        if readable_by_others(path):
            problem = f"{path}: every user of this machine can read it"
            yield Finding("secret", Level.FAIL, problem, f"chmod 600 {path}")
        else:
            yield Finding("secret", Level.OK, f"{path}: not readable by all users")


def version_findings() -> Iterator[Finding]:
    """Report installed packages with a known vulnerability, or one finding if there are none."""
    num_checked, outdated = 0, False
    for name, (minimum, advisory) in MINIMUMS.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        num_checked += 1
        if (finding := judge_version(name, version, minimum, advisory)).level is not Level.OK:
            outdated = True
            yield finding
    if num_checked and not outdated:
        yield Finding("advisories", Level.OK, f"{num_checked} packages have the fixes for known advisories")


def judge_version(name: str, version: str, minimum: str, advisory: str) -> Finding:
    """Compare an installed version with the first release that has the fix."""
    if Version(version) >= Version(minimum):
        return Finding(f"advisory: {name}", Level.OK, version)
    return Finding(
        f"advisory: {name}",
        Level.FAIL,
        f"{version} is affected by {advisory}, which is fixed in {minimum}",
        f"pip install '{name}>={minimum}', with -c constraints.txt in a checkout",
    )


def readable_by_others(path: Path) -> bool:
    """Return True if users outside the file's group can read it, by its mode and those of all parent folders."""
    path = path.absolute()
    if not path.stat().st_mode & stat.S_IROTH:
        return False
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)


def no_hub(folder: Path) -> Finding:
    """Return the finding for a folder without a hub."""
    return Finding("hub", Level.OK, f"no {CONFIG_NAME} in {folder}; pass the hub's folder with --dir")


def _is_secret(path: Path) -> bool:
    """Return True for a file that may contain a private key. A file that this user cannot read is not checked."""
    try:
        with path.open("rb") as file:
            text = file.read(1 << 16)
    except PermissionError:
        return False
    public = re.search(rb"BEGIN (CERTIFICATE|PUBLIC KEY)", text) and _PRIVATE not in text
    return not public


def hub_findings(folder: Path) -> Iterator[Finding]:
    """Check a hub's config, certificate and database, without writing or locking anything."""
    path = folder / CONFIG_NAME
    try:
        config = load_config(path, ServerConfig)
    except GymError as error:
        remedy = f"fix {path}; gym-server run reports each error"
        yield Finding("hub", Level.FAIL, plain(error.message, 400), remedy)
        return
    yield judge_listen(config)
    if config.dashboard is not None:
        yield judge_dashboard(config.dashboard.listen, config.dashboard.public)
    yield judge_certificate(folder / "keys" / "tls.crt", datetime.now(UTC))
    yield judge_database(path, config.storage.database)
    if config.storage.database.startswith("sqlite:///"):
        yield judge_invites(folder / config.storage.database.removeprefix("sqlite:///"), time.time())
    else:
        text = "not checked: the database is not SQLite; see gym-server invites list"
        yield Finding("invites", Level.OK, text)


def judge_listen(config: ServerConfig) -> Finding:
    """Check the hub's address and enrolment policy. Except on loopback, the hub always uses TLS."""
    policy = config.enrolment.policy
    seen = f"{config.listen}, TLS with the hub's key, enrolment: {policy}"
    if policy == "open" and not Endpoint.parse(config.listen, least_port=0).is_loopback:
        remedy = "set enrolment: {policy: invite}, unless anybody may contribute (docs/security.md)"
        return Finding("listen: hub", Level.WARN, f"{seen}: anybody who can reach it can enrol", remedy)
    return Finding("listen: hub", Level.OK, seen)


def judge_dashboard(listen: str, public: bool) -> Finding:
    """Check whether other machines can read the dashboard without a key."""
    if public and not Endpoint.parse(listen, least_port=0).is_loopback:
        remedy = "set dashboard: {public: false}, unless anybody may see the rounds"
        return Finding("listen: dashboard", Level.WARN, f"{listen}: readable without a key", remedy)
    access = "readable without a key" if public else "requires a key"
    return Finding("listen: dashboard", Level.OK, f"{listen}, {access}")


def judge_certificate(path: Path, now: datetime) -> Finding:
    """Check the validity period of the certificate that the hub serves."""
    level, remedy = Level.FAIL, "get a new one: gym-server certificate (docs/hub-on-the-internet.md)"
    try:
        begin, end = validity(path.read_bytes())
    except (OSError, GymError) as error:
        reason = error.message if isinstance(error, GymError) else error.strerror
        return Finding("certificate", level, f"{path}: {plain(reason, 200)}", remedy)
    if now < begin:
        state = f"not valid before {begin:%Y-%m-%d}"
    elif now > end:
        state = f"expired on {end:%Y-%m-%d}"
    elif end - now < SOON:
        level, state = Level.WARN, f"expires on {end:%Y-%m-%d}"
    else:
        level, state, remedy = Level.OK, f"valid until {end:%Y-%m-%d}", ""
    return Finding("certificate", level, f"{path}: {state}", remedy)


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
    seen = counted(len(rows), "unused invite")
    if rows:
        seen += f", the last one expires in {counted(round((latest - now) / _DAY_SECONDS), 'day')}"
    if latest - now > LONG_INVITE.total_seconds():
        return Finding("invites", Level.WARN, seen, remedy)
    return Finding("invites", Level.OK, seen)
