"""The private keys of a home: the newest in ``key.pem``, and in ``keys/`` those that some hub still knows.

All are plain or all are under one passphrase, which is asked for once a process. Every change is one atomic rename, so
that a kill leaves each key in its old form or in its new one.
"""

from __future__ import annotations

import os
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import fsync_folder, make_folder, write_atomically
from gym_fed.trust.identity.encryption import is_encrypted
from gym_fed.trust.identity.keys import SigningKey, load_or_create
from gym_fed.trust.identity.passphrase import PassphraseSource

PASSPHRASE_VARIABLE = "GYM_PASSPHRASE"
_NAME_DIGITS = 16

_sources: dict[Path, PassphraseSource] = {}
_opened: dict[Path, tuple[tuple[int, int, int], SigningKey]] = {}
"""Keys by file, with what identifies an unchanged file: a passphrase takes half a second to try."""


def passphrases(folder: Path) -> PassphraseSource:
    """Where the passphrase of a home's keys comes from; the same object for the life of the process."""
    return _sources.setdefault(folder.absolute(), PassphraseSource(PASSPHRASE_VARIABLE))


class Keystore:
    """The keys in one home's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.main_path = folder / "key.pem"
        self.next_path = folder / "keys" / "next.pem"

    @property
    def is_encrypted(self) -> bool:
        """Whether the newest key is under a passphrase."""
        return self.main_path.exists() and is_encrypted(self.main_path.read_bytes())

    def main(self) -> SigningKey:
        """The newest key, generated on first use."""
        if not self.main_path.exists():
            load_or_create(self.main_path)
        return self._load(self.main_path)

    def next(self) -> SigningKey:
        """The key of a rotation that is under way."""
        return self._load(self.next_path)

    def find(self, public_key: str) -> SigningKey:
        """A key by its public half, hex.

        Raises:
            GymError: ``FILE_NOT_FOUND`` when the home has no such key.
        """
        main = self.main()
        if main.public_key.hex() == public_key:
            return main
        path = self._former(public_key)
        if not path.exists():
            raise GymError(
                ErrorCode.FILE_NOT_FOUND,
                f"no private key for {public_key[:16]}... in {path.parent}",
                "gym-client key import FILE, in a home of its own",
            )
        found = self._load(path)
        if found.public_key.hex() != public_key:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{path} holds the key {found.public_key.hex()}, not {public_key}",
                "restore the file from a backup of the home",
            )
        return found

    def keep_main(self) -> None:
        """Copy the newest key to ``keys/``, where it outlives being replaced."""
        path = self._former(self.main().public_key.hex())
        if not path.exists():
            make_folder(path.parent, 0o700)
            write_atomically(path, self.main_path.read_bytes(), mode=0o600)

    def prepare(self, key: SigningKey) -> None:
        """Write the key that is to be the newest, under the same passphrase."""
        secret = self._secret() if self.is_encrypted else None
        make_folder(self.next_path.parent, 0o700)
        key.save(self.next_path, secret)

    def promote(self) -> None:
        """Make the prepared key the newest."""
        os.replace(self.next_path, self.main_path)
        fsync_folder(self.folder)
        fsync_folder(self.next_path.parent)

    def forget_former(self, needed: set[str]) -> None:
        """Remove replaced keys but those of the given public halves, hex."""
        keep = {self._former(public_key) for public_key in needed} | {self.next_path}
        for path in self._files():
            if path.parent == self.next_path.parent and path not in keep:
                path.unlink()

    def encrypt(self, new: PassphraseSource) -> int:
        """Put every key under a passphrase, or under another one; returns how many files were written.

        Raises:
            GymError: ``KEY_LOCKED`` when the present passphrase is missing or wrong.
        """
        self.main()
        files = self._files()
        secret = new.create(str(self.main_path))
        keys = [self._load_either(path, secret) for path in files]
        for path, key in zip(files, keys, strict=True):
            write_atomically(path, key.to_pem(secret), mode=0o600)
        self._drop_partial()
        _sources[self.folder.absolute()] = new
        return len(files)

    def decrypt(self) -> int:
        """Take the passphrase away; returns how many files were written."""
        files = [path for path in self._files() if is_encrypted(path.read_bytes())]
        keys = [self._load(path) for path in files]
        for path, key in zip(files, keys, strict=True):
            write_atomically(path, key.to_pem(), mode=0o600)
        return len(files)

    def _load(self, path: Path) -> SigningKey:
        found = path.stat() if path.exists() else None
        stamp = (found.st_ino, found.st_mtime_ns, found.st_size) if found else (0, 0, 0)
        known = _opened.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        source = passphrases(self.folder)
        try:
            key = SigningKey.load(path, source.get)
        except GymError as error:
            if error.code is ErrorCode.KEY_LOCKED:
                source.forget()
            raise
        _opened[path] = (stamp, key)
        return key

    def _load_either(self, path: Path, new: bytes) -> SigningKey:
        """A key that has its present passphrase, or already the new one since a kill cut the change short."""
        try:
            return SigningKey.load(path, lambda _: new)
        except GymError as error:
            if error.code is not ErrorCode.KEY_LOCKED:
                raise
        return self._load(path)

    def _secret(self) -> bytes:
        return passphrases(self.folder).get(str(self.main_path))

    def _former(self, public_key: str) -> Path:
        return self.folder / "keys" / f"{public_key[:_NAME_DIGITS]}.pem"

    def _files(self) -> list[Path]:
        former = sorted((self.folder / "keys").glob("[0-9a-fn]*.pem"))
        return [*former, self.main_path]

    def _drop_partial(self) -> None:
        """Remove what a kill left of a file that was being written, which may hold a plain key."""
        for path in [*self.folder.glob(".*.pem.*.partial"), *self.folder.glob("keys/.*.pem.*.partial")]:
            path.unlink()
