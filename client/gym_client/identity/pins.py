"""Pins of trusted hubs: one file per address with the fingerprint of the key, the certificate and the hub's id.

A pin also records the home's key and account on that hub.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, ValidationError

from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.keystore import Keystore
from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.trust.identity.keys import SigningKey

LAST_SERVER = "server"
"""The setting with the address of the last joined hub."""

_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")


class ServerPin(StrictModel):
    """The identity of a hub since first contact. For plain-text connections (loopback only) there is no fingerprint."""

    address: str
    fingerprint: str = Field(pattern=r"^(sha256:[0-9a-f]{64})?$")
    certificate_pem: str
    server: str = Field(default="", pattern=r"^(s[0-9a-f]{16})?$")
    """The hub's id, derived from its ledger key; empty until the first status."""
    ledger_key: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """The hub's ledger key in hex, which verifies receipts."""
    name: str = ""
    contributor: str = ""
    """The id of this contributor's account; empty before enrolment and after leaving."""
    left: str = ""
    """The id of an account that has left the hub; only its key can join as that account again."""
    public_key: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """The account's public key in hex; empty if it is the home's newest key."""

    @property
    def account(self) -> str:
        """The id of the account, active or left; empty if there is none."""
        return self.contributor or self.left

    @classmethod
    def load(cls, home: Home, address: Address) -> ServerPin | None:
        """Load the pin of an address; None before the first contact.

        Raises:
            GymError: ``STATE_CORRUPT`` for an unreadable file.
        """
        path = pin_path(home, address)
        return cls.read(path) if path.exists() else None

    @classmethod
    def read(cls, path: Path) -> ServerPin:
        """Read a pin from its file; raises the same errors as ``load``."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{path}: {error.errors()[0]['msg']}",
                "delete the file and join again; compare the fingerprint then",
            ) from error

    def save(self, home: Home, address: Address) -> None:
        """Write the pin durably, and copy the account to the pins of the hub's other addresses."""
        write_atomically(pin_path(home, address), self.model_dump_json(indent=2).encode())
        if not (self.server and self.fingerprint):
            return
        account = {name: getattr(self, name) for name in ("contributor", "left", "public_key")}
        for path in sorted(home.servers.glob("*.json")):
            other = ServerPin.read(path)
            same = (other.server, other.fingerprint) == (self.server, self.fingerprint)
            if same and path != pin_path(home, address) and other.but(**account) != other:
                write_atomically(path, other.but(**account).model_dump_json(indent=2).encode())

    def but(self, **changes: str) -> ServerPin:
        """Return a copy with some fields changed."""
        return self.model_copy(update=changes)


def left_in_words(pin: ServerPin) -> str:
    """Describe what remains of an account that has left."""
    return (
        f"{pin.left} has left {pin.name or pin.address}; its contributions and credits stay there; you can join "
        "again at any time"
    )


def pin_with_key(home: Home, fingerprint: str) -> ServerPin | None:
    """Return a pin with this TLS key, for any address; None if there is none."""
    pins = (ServerPin.read(path) for path in sorted(home.servers.glob("*.json")))
    return next((pin for pin in pins if pin.fingerprint == fingerprint), None)


def require_one_pin(home: Home, pin: ServerPin, server: str, ledger_key: str) -> None:
    """Check that all addresses with the same hub id also have the same keys.

    A hub is identified by its TLS key. A second address may lead to the same hub, but then with the same key. If the
    keys differ, one of the addresses imitates the other's id, and nothing is signed for either of them.

    Args:
        home: The home with the pins.
        pin: The pin of the hub that answered.
        server: Id that is derived from the ledger key of the hub.
        ledger_key: The ledger key in hex.

    Raises:
        GymError: ``SERVER_KEY_CHANGED`` with both addresses and their pin files.
    """
    for path in sorted(home.servers.glob("*.json")):
        other = ServerPin.read(path)
        if (
            other.address == pin.address
            or other.server != server
            or not (pin.fingerprint and other.fingerprint)
        ):
            continue  # plain-text connections (loopback) have no TLS key to compare
        same_ledger = not other.ledger_key or other.ledger_key == ledger_key
        if other.fingerprint == pin.fingerprint and same_ledger:
            continue
        key_kind = "TLS key" if same_ledger else "ledger key"
        keys = (other.fingerprint, pin.fingerprint) if same_ledger else (other.ledger_key, ledger_key)
        own = pin_path(home, Address.parse(pin.address))
        raise GymError(
            ErrorCode.SERVER_KEY_CHANGED,
            f"{pin.address} claims to be the hub {server}, which is known at {other.address} with a different "
            f"{key_kind}: pinned {keys[0]}, found {keys[1]}",
            "one address imitates the other: ask the coordinator for the fingerprint. If the hub has moved and has "
            f"a different TLS key, delete {path} and join again; if not, delete {own}",
        )


def pin_path(home: Home, address: Address) -> Path:
    """Return the path of an address's pin file."""
    return home.servers / f"{address.file_name}.json"


def parse_fingerprint(text: str) -> str:
    """Normalize a fingerprint to ``sha256:<hex>``.

    Raises:
        GymError: ``USAGE`` with the invalid text.
    """
    fingerprint = text.strip().lower()
    fingerprint = fingerprint if fingerprint.startswith("sha256:") else f"sha256:{fingerprint}"
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise GymError(ErrorCode.USAGE, f"{text!r} is not a fingerprint", "write sha256: and 64 hex digits")
    return fingerprint


def key_for(home: Home, pin: ServerPin) -> SigningKey:
    """Return the key of this home's account on a hub.

    Raises:
        GymError: ``STATE_LOCKED`` during an unfinished rotation.
    """
    store = Keystore(home.folder)
    if store.next_path.exists():
        raise GymError(
            ErrorCode.STATE_LOCKED,
            f"a key rotation in {home.folder} was interrupted",
            "run gym-client key rotate again to resume it",
        )
    key = store.find(pin.public_key) if pin.public_key else store.main()
    return key.of_account(pin.account) if pin.account else key


def key_at(home: Home, server: str) -> SigningKey:
    """Return the key for a hub, given its id, like ``key_for``; the newest key if there is no account."""
    for pin in enrolled(home):
        if pin.server == server:
            return key_for(home, pin)
    return home.key


def enrolled(home: Home) -> list[ServerPin]:
    """List the pins of the hubs where this home is enrolled, by address."""
    return [pin for pin in with_account(home) if pin.contributor]


def with_account(home: Home) -> list[ServerPin]:
    """List the pins of hubs where this home has an account or had one, since an account that left may have credits.

    A hub that is known at several addresses is listed once, with the address that was joined last.
    """
    last = home.settings().get(LAST_SERVER)
    pins = [ServerPin.read(path) for path in sorted(home.servers.glob("*.json"))]
    by_hub: dict[tuple[str, str], ServerPin] = {}
    for pin in sorted(pins, key=lambda pin: pin.address != last):
        if pin.account:
            is_known = bool(pin.server and pin.fingerprint)
            by_hub.setdefault((pin.server, pin.fingerprint) if is_known else (pin.address, ""), pin)
    return sorted(by_hub.values(), key=lambda pin: pin.address)
