"""The contributor's home folder: key, instance, pins, caches, receipts, and the lock that guards them."""

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
    """Everything a contributor keeps on disk.

    ``key.pem`` and ``keys/`` (mode 0600), ``instance``, ``machine``, ``settings.json``, ``policy.yaml`` (optional),
    ``servers/``, ``objects/``, ``bases/``, ``tasks/``, ``residuals/``, ``receipts.jsonl``. Open one with ``Home.open``.
    """

    def __init__(self, folder: Path) -> None:
        """Use ``open``."""
        self.folder = folder

    @classmethod
    def open(cls, folder: str | Path | None = None) -> Home:
        """The home at ``folder``, ``$GYM_HOME`` or ``~/.gym-fed``; made (mode 0700) on first use."""
        chosen = Path(folder).expanduser() if folder else default_home()
        require_utf8("the home folder", chosen.absolute(), "choose another with --home")
        try:
            make_folder(chosen.absolute(), 0o700)
        except OSError as error:
            raise system_error(error) or error from error
        return cls(chosen.absolute())

    @property
    def key(self) -> SigningKey:
        """The contributor's newest Ed25519 key, generated on first use. A hub's is ``keystore.key_for``."""
        return Keystore(self.folder).main()

    @property
    def instance(self) -> str:
        """A random name of this installation; the hub gives the same instance its leases back."""
        path = self.folder / "instance"
        if not path.exists():
            write_atomically(path, secrets.token_hex(16).encode())
        text = path.read_text(encoding="ascii", errors="replace").strip()
        if not re.fullmatch(r"[0-9a-f]{32}", text):
            raise GymError(
                ErrorCode.STATE_CORRUPT, f"{path} holds {text!r}, not 32 hex digits", "delete the file"
            )
        return text

    @property
    def policy_path(self) -> Path:
        return self.folder / "policy.yaml"

    @property
    def consents_path(self) -> Path:
        """Terms of hubs that the contributor agreed to."""
        return self.folder / "consents.json"

    @property
    def receipts_path(self) -> Path:
        return self.folder / "receipts.jsonl"

    @property
    def objects(self) -> Path:
        """Cache of objects, each named by its sha256."""
        return self._made("objects")

    @property
    def bases(self) -> Path:
        """Base models that were fetched from hubs."""
        return self._made("bases")

    @property
    def servers(self) -> Path:
        """Pins of the hubs that are trusted."""
        return self._made("servers")

    @property
    def proofs(self) -> Path:
        """What hubs signed that contradicts what they signed before."""
        return self._made("proofs")

    @property
    def tasks(self) -> Path:
        """Work in progress, a folder each."""
        return self._made("tasks")

    def task_folder(self, message_id: str) -> Path:
        """Folder of a task; created by the process that starts it.

        Raises:
            GymError: ``USAGE`` for an id that is not a plain file name.
        """
        if not _NAME.fullmatch(message_id):
            raise GymError(ErrorCode.USAGE, f"task id {message_id[:140]!r} is not a plain name")
        return self.tasks / message_id

    def residuals(self, server: str) -> Path:
        """Error-feedback residuals kept for one hub."""
        if not _NAME.fullmatch(server):
            raise GymError(ErrorCode.USAGE, f"server id {server[:140]!r} is not a plain name")
        return self._made(f"residuals/{server}")

    def settings(self) -> dict[str, Any]:
        """What the last ``join`` was given: server, data, format, columns, model, name."""
        path = self.folder / "settings.json"
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise GymError(ErrorCode.STATE_CORRUPT, f"{path} is not JSON: {error}", "delete it") from error
        if not isinstance(found, dict):
            raise GymError(ErrorCode.STATE_CORRUPT, f"{path} is not a JSON object", "delete it")
        return found

    def remember(self, **settings: Any) -> None:
        """Keep settings for the next ``join``; None forgets one."""
        merged = {**self.settings(), **settings}
        kept = {key: value for key, value in merged.items() if value is not None}
        write_atomically(self.folder / "settings.json", json.dumps(kept, indent=2, sort_keys=True).encode())

    def append_receipt(self, receipt: dict[str, Any]) -> None:
        """Add a line to ``receipts.jsonl``, durably; a receipt that is there already is left alone.

        Two receipts are one where only what this machine counted beside it (``bytes_down``, ``bytes_up``) differs.
        """
        line = json.dumps(receipt, sort_keys=True, ensure_ascii=False)
        if line in self._receipt_lines() or _signed(receipt) in map(_signed, self.receipts()):
            return
        known = self.receipts_path.read_bytes() if self.receipts_path.exists() else b""
        # What a crash cut short stays where it is, on a line of its own.
        append_lines(self.receipts_path, [line] if known[-1:] in (b"", b"\n") else ["", line])

    def receipts(self) -> list[dict[str, Any]]:
        """All receipts, oldest first; a line that a crash cut short is left out."""
        found: list[dict[str, Any]] = []
        for line in self._receipt_lines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
        return found

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the home for this process; the lock ends with the process, however it ends.

        Raises:
            GymError: ``STATE_LOCKED`` naming the process that has it.
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
                    "stop it, or give this one a folder of its own with --home",
                ) from error
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            yield
        finally:
            os.close(descriptor)

    def _receipt_lines(self) -> list[str]:
        if not self.receipts_path.exists():
            return []
        return self.receipts_path.read_text(encoding="utf-8", errors="replace").splitlines()

    def _made(self, name: str) -> Path:
        path = self.folder / name
        make_folder(path)
        return path


def _signed(receipt: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in receipt.items() if key not in ("bytes_down", "bytes_up")}
