"""`gym doctor --security`: who can read the keys and secrets of this machine, and which versions have advisories."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from importlib import metadata
from itertools import islice
from pathlib import Path

from packaging.version import Version

from gym_fed.doctor.check import Finding, Level
from gym_fed.doctor.hub_security import CONFIG_NAME, hub_findings

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
"""The first release without a serious flaw of the past. It is no substitute for `make audit`, which queries PyPI."""

MAX_KEYS = 1000
_PRIVATE = b"PRIVATE KEY-----"


def security_findings(home: Path, hub: Path) -> list[Finding]:
    """Run every security check.

    Args:
        home: The contributor's home folder; it need not exist.
        hub: The folder of a hub; without a ``gym-server.yaml`` in it, no hub is looked at.
    """
    if os.name == "nt":
        files = [Finding("files", Level.OK, "not checked: Windows has no file modes")]
    else:
        files = [*home_findings(home), *key_findings(hub / "keys", "hub"), *secret_findings(hub)]
    network = hub_findings(hub) if (hub / CONFIG_NAME).is_file() else [no_hub(hub)]
    return [*files, *network, *version_findings()]


def home_findings(home: Path) -> Iterator[Finding]:
    """The modes of a contributor's home and of the keys in it."""
    if not home.is_dir():
        yield Finding("home", Level.OK, f"{home} does not exist; it is made with mode 0700")
        return
    mode = stat.S_IMODE(home.stat().st_mode)
    remedy = f"chmod 700 {home}"
    if mode & 0o022:
        yield Finding("home", Level.FAIL, f"{home}: mode {mode:04o}, other users can write", remedy)
    elif mode & 0o077:
        yield Finding("home", Level.WARN, f"{home}: mode {mode:04o}, other users can look inside", remedy)
    else:
        yield Finding("home", Level.OK, f"{home}: mode {mode:04o}")
    yield from key_findings(home, "home")
    yield from key_findings(home / "keys", "home")


def key_findings(folder: Path, owner: str) -> Iterator[Finding]:
    """Private keys in a folder must have mode 0600, whatever the folders above allow: folders are moved."""
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
                f"chmod 600 {path}; if others have an account here, replace the key (docs/keys.md)",
            )
        else:
            yield Finding(name, Level.OK, f"{path}: mode {mode:04o}")


def secret_findings(folder: Path) -> Iterator[Finding]:
    """Files of tokens and passwords that other programs of ours read, each only where it exists."""
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
            yield Finding(
                "secret", Level.FAIL, f"{path}: every user of this machine can read it", f"chmod 600 {path}"
            )
        else:
            yield Finding("secret", Level.OK, f"{path}: closed to other users")


def version_findings() -> Iterator[Finding]:
    """Installed packages below the first release without a known flaw; one line when there is none."""
    looked_at = 0
    for name, (minimum, advisory) in MINIMUMS.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        looked_at += 1
        if (finding := judge_version(name, version, minimum, advisory)).level is not Level.OK:
            yield finding
            looked_at = -len(MINIMUMS)
    if looked_at > 0:
        yield Finding("advisories", Level.OK, f"none of {looked_at} packages is below its known minimum")


def judge_version(name: str, version: str, minimum: str, advisory: str) -> Finding:
    """Compare an installed version with the first one that has the fix."""
    if Version(version) >= Version(minimum):
        return Finding(f"advisory: {name}", Level.OK, version)
    return Finding(
        f"advisory: {name}",
        Level.FAIL,
        f"{version}, and {advisory} is fixed in {minimum}",
        f"pip install '{name}>={minimum}', with -c constraints.txt in a checkout",
    )


def readable_by_others(path: Path) -> bool:
    """True if users outside the file's group can read it: its mode, and every folder above it, allow that."""
    path = path.absolute()
    if not path.stat().st_mode & stat.S_IROTH:
        return False
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)


def no_hub(folder: Path) -> Finding:
    """The line for a folder without a hub."""
    return Finding("hub", Level.OK, f"no {CONFIG_NAME} in {folder}; name the hub's folder with --hub")


def _is_secret(path: Path) -> bool:
    """A PEM file with a private key, or a ``.key`` file of any form. An unreadable file is another user's: closed."""
    try:
        with path.open("rb") as file:
            text = file.read(1 << 16)
    except PermissionError:
        return False
    public = re.search(rb"BEGIN (CERTIFICATE|PUBLIC KEY)", text) and _PRIVATE not in text
    return not public
