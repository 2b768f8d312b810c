"""The private keys of a home: the newest in ``key.pem``, and former keys that some hub still needs in ``keys/``.

Either all keys are unencrypted, or all have the same passphrase, which is requested once per process. Every change is
an atomic rename, so a crash leaves each key in its old or new form.
"""

from __future__ import annotations

import os
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import fsync_folder, make_folder, write_atomically
from gym_fed.trust.identity.keys import SigningKey, is_encrypted, load_or_create
from gym_fed.trust.identity.passphrase import PassphraseSource

PASSPHRASE_VARIABLE = "GYM_PASSPHRASE"
_NAME_DIGITS = 16

_sources: dict[Path, PassphraseSource] = {}
_opened: dict[Path, tuple[tuple[int, int, int], SigningKey]] = {}
"""Loaded keys by file, with the file's inode, time and size. Deriving a key from a passphrase takes half a second."""


def passphrases(folder: Path) -> PassphraseSource:
    """Return the source of a home's passphrase; there is one object per home and process."""
    return _sources.setdefault(folder.absolute(), PassphraseSource(PASSPHRASE_VARIABLE))


class Keystore:
    """The keys in a home's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.main_path = folder / "key.pem"
        self.next_path = folder / "keys" / "next.pem"

    @property
    def is_encrypted(self) -> bool:
        """True if the newest key has a passphrase."""
        return self.main_path.exists() and is_encrypted(self.main_path.read_bytes())

    def main(self) -> SigningKey:
        """Load the newest key, generating it on first use."""
        if not self.main_path.exists():
            load_or_create(self.main_path)
        return self._load(self.main_path)

    def next(self) -> SigningKey:
        """Load the prepared key of an unfinished rotation."""
        return self._load(self.next_path)

    def find(self, public_key: str) -> SigningKey:
        """Load a key, given its public key in hex.

        Raises:
            GymError: ``FILE_NOT_FOUND`` if the home does not have the key.
        """
        main = self.main()
        if main.public_key.hex() == public_key:
            return main
        path = self._former(public_key)
        if not path.exists():
            raise GymError(
                ErrorCode.FILE_NOT_FOUND,
                f"no private key for {public_key[:16]}... in {path.parent}",
                "use gym-client key import FILE in a separate home",
            )
        key = self._load(path)
        if key.public_key.hex() != public_key:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{path} contains the key {key.public_key.hex()}, not {public_key}",
                "restore the file from a backup of the home",
            )
        return key

    def keep_main(self) -> None:
        """Copy the newest key to ``keys/`` before it is replaced."""
        path = self._former(self.main().public_key.hex())
        if not path.exists():
            make_folder(path.parent, 0o700)
            write_atomically(path, self.main_path.read_bytes(), mode=0o600)

    def prepare(self, key: SigningKey) -> None:
        """Write the next key of a rotation, encrypted with the same passphrase."""
        secret = self._secret() if self.is_encrypted else None
        make_folder(self.next_path.parent, 0o700)
        key.save(self.next_path, secret)

    def promote(self) -> None:
        """Replace the newest key with the prepared one."""
        os.replace(self.next_path, self.main_path)
        fsync_folder(self.folder)
        fsync_folder(self.next_path.parent)

    def forget_former(self, needed: set[str]) -> None:
        """Delete the former keys, except those whose public keys (hex) are in ``needed``."""
        keep = {self._former(public_key) for public_key in needed} | {self.next_path}
        for path in self._files():
            if path.parent == self.next_path.parent and path not in keep:
                path.unlink()

    def encrypt(self, new: PassphraseSource) -> int:
        """Encrypt all keys with a new passphrase, and return the number of files written.

        Raises:
            GymError: ``KEY_LOCKED`` if the current passphrase is missing or wrong.
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
        """Remove the passphrase from all keys, and return the number of files written."""
        files = [path for path in self._files() if is_encrypted(path.read_bytes())]
        keys = [self._load(path) for path in files]
        for path, key in zip(files, keys, strict=True):
            write_atomically(path, key.to_pem(), mode=0o600)
        return len(files)

    def _load(self, path: Path) -> SigningKey:
        status = path.stat() if path.exists() else None
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size) if status else (0, 0, 0)
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
        """Load a key with the current passphrase, or with the new one if a change was interrupted."""
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
        """Delete the partial files of interrupted writes, which may contain an unencrypted key."""
        for path in [*self.folder.glob(".*.pem.*.partial"), *self.folder.glob("keys/.*.pem.*.partial")]:
            path.unlink()
