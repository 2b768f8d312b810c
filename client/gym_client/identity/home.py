"""The contributor's home folder: key, instance, pins, caches, receipts and a lock."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gym_client.identity.keystore import Keystore
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.file_lock import LockHeldError, lock
from gym_fed.core.files import append_lines, default_home, make_folder, write_atomically
from gym_fed.core.portable import read_at
from gym_fed.core.system_errors import system_error
from gym_fed.core.text import require_utf8
from gym_fed.trust.identity.keys import SigningKey

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


class Home:
    """The contributor's home folder. Open one with ``Home.open``.

    It contains ``key.pem`` and ``keys/`` (mode 0600), ``instance``, ``machine``, ``settings.json``, ``policy.yaml``
    (optional), ``servers/``, ``objects/``, ``bases/``, ``tasks/``, ``residuals/``, ``audits/``, ``seeds/``,
    ``seeding.json``, ``soups.json`` and ``receipts.jsonl``.
    """

    def __init__(self, folder: Path) -> None:
        """Create the object for a folder; use ``open`` instead."""
        self.folder = folder

    @classmethod
    def open(cls, folder: str | Path | None = None) -> Home:
        """Open the home at ``folder``, ``$GYM_HOME`` or ``~/.gym-fed``; create it (mode 0700) if needed."""
        chosen = Path(folder).expanduser() if folder else default_home()
        require_utf8("the home folder", chosen.absolute(), "choose another with --home")
        try:
            make_folder(chosen.absolute(), 0o700)
        except OSError as error:
            raise system_error(error) or error from error
        return cls(chosen.absolute())

    @property
    def key(self) -> SigningKey:
        """The contributor's newest Ed25519 key, generated on first use. See ``pins.key_for`` for the key on a hub."""
        return Keystore(self.folder).main()

    @property
    def instance(self) -> str:
        """The random id of this installation. A hub assigns leased tasks to the same instance again."""
        path = self.folder / "instance"
        if not path.exists():
            write_atomically(path, secrets.token_hex(16).encode())
        text = path.read_text(encoding="ascii", errors="replace").strip()
        if not re.fullmatch(r"[0-9a-f]{32}", text):
            raise GymError(
                ErrorCode.STATE_CORRUPT, f"{path} contains {text!r}, not 32 hex digits", "delete the file"
            )
        return text

    @property
    def policy_path(self) -> Path:
        return self.folder / "policy.yaml"

    @property
    def consents_path(self) -> Path:
        """The path of the file with the accepted terms."""
        return self.folder / "consents.json"

    @property
    def receipts_path(self) -> Path:
        return self.folder / "receipts.jsonl"

    @property
    def objects(self) -> Path:
        """The cache of objects, which are named by their SHA-256."""
        return self._made("objects")

    @property
    def bases(self) -> Path:
        """The folder of fetched base models."""
        return self._made("bases")

    @property
    def servers(self) -> Path:
        """The folder of pinned hubs."""
        return self._made("servers")

    @property
    def audits(self) -> Path:
        """The folder with the evidence for audits, by update."""
        return self._made("audits")

    @property
    def proofs(self) -> Path:
        """The folder with the proofs that a hub has signed contradictory ledgers."""
        return self._made("proofs")

    @property
    def tasks(self) -> Path:
        """The folder of unfinished tasks."""
        return self._made("tasks")

    def task_folder(self, message_id: str) -> Path:
        """Return the folder of a task; the process that starts the task creates it.

        Raises:
            GymError: ``USAGE`` for an id that is not a plain file name.
        """
        if not _NAME.fullmatch(message_id):
            raise GymError(ErrorCode.USAGE, f"task id {message_id[:140]!r} is not a plain name")
        return self.tasks / message_id

    def residuals(self, server: str) -> Path:
        """Return the folder with the error feedback residuals for a hub."""
        if not _NAME.fullmatch(server):
            raise GymError(ErrorCode.USAGE, f"server id {server[:140]!r} is not a plain name")
        return self._made(f"residuals/{server}")

    def versions(self, server: str) -> Path:
        """Return the folder with the integer sum of a hub's soups."""
        if not _NAME.fullmatch(server):
            raise GymError(ErrorCode.USAGE, f"server id {server[:140]!r} is not a plain name")
        return self._made(f"versions/{server}")

    def settings(self) -> dict[str, Any]:
        """Read the settings of the last ``join``: server, data, format, columns, model, name."""
        path = self.folder / "settings.json"
        if not path.exists():
            return {}
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise GymError(ErrorCode.STATE_CORRUPT, f"{path} is not JSON: {error}", "delete it") from error
        if not isinstance(settings, dict):
            raise GymError(ErrorCode.STATE_CORRUPT, f"{path} is not a JSON object", "delete it")
        return settings

    def remember(self, **settings: Any) -> None:
        """Store settings for the next ``join``; None deletes a setting."""
        merged = {**self.settings(), **settings}
        present = {key: value for key, value in merged.items() if value is not None}
        write_atomically(
            self.folder / "settings.json", json.dumps(present, indent=2, sort_keys=True).encode()
        )

    def append_receipt(self, receipt: dict[str, Any]) -> None:
        """Append a receipt to ``receipts.jsonl`` durably, unless it is already there.

        Receipts are considered equal if only their byte counts (``bytes_down``, ``bytes_up``) differ.
        """
        line = json.dumps(receipt, sort_keys=True, ensure_ascii=False)
        if line in self._receipt_lines() or _signed(receipt) in map(_signed, self.receipts()):
            return
        known = self.receipts_path.read_bytes() if self.receipts_path.exists() else b""
        # A line that a crash has truncated stays in the file; the new line starts after it.
        append_lines(self.receipts_path, [line] if known[-1:] in (b"", b"\n") else ["", line])

    def receipts(self) -> list[dict[str, Any]]:
        """Read all receipts, oldest first, skipping lines that a crash has truncated."""
        receipts: list[dict[str, Any]] = []
        for line in self._receipt_lines():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                receipts.append(value)
        return receipts

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the home for this process.

        Raises:
            GymError: ``STATE_LOCKED`` with the id of the process that holds the lock.
        """
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                lock(descriptor)
            except LockHeldError as error:
                owner = read_at(descriptor, 20, 0).decode("ascii", errors="replace").strip() or "unknown"
                raise GymError(
                    ErrorCode.STATE_LOCKED,
                    f"another gym-client (process {owner}) uses {self.folder}",
                    "stop it, or use a different folder with --home",
                ) from error
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            yield
        finally:
            os.close(descriptor)

    def _receipt_lines(self) -> list[str]:
        if not self.receipts_path.exists():
            return []
        # not splitlines: a hub's text may contain other line separators, such as U+2028
        return self.receipts_path.read_text(encoding="utf-8", errors="replace").split("\n")

    def _made(self, name: str) -> Path:
        path = self.folder / name
        make_folder(path)
        return path


def _signed(receipt: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in receipt.items() if key not in ("bytes_down", "bytes_up")}
