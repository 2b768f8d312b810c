"""Which of a home's keys speaks to which hub, and for which account."""

from __future__ import annotations

from gym_client.home import Home
from gym_client.keystore import Keystore
from gym_client.pins import ServerPin
from gym_fed.errors import ErrorCode, GymError
from gym_fed.identity.keys import SigningKey


def key_for(home: Home, pin: ServerPin) -> SigningKey:
    """The key that a hub knows this home's account by.

    Raises:
        GymError: ``STATE_LOCKED`` while a rotation has neither ended nor been taken up again.
    """
    store = Keystore(home.folder)
    if store.next_path.exists():
        raise GymError(
            ErrorCode.STATE_LOCKED,
            f"a key rotation in {home.folder} was interrupted",
            "run gym-client key rotate again; it goes on where it stopped",
        )
    key = store.find(pin.public_key) if pin.public_key else store.main()
    return key.of_account(pin.account) if pin.account else key


def key_at(home: Home, server: str) -> SigningKey:
    """As ``key_for``, by the hub's id; the newest key where this home has no account."""
    for pin in enrolled(home):
        if pin.server == server:
            return key_for(home, pin)
    return home.key


def enrolled(home: Home) -> list[ServerPin]:
    """The hubs at which this home takes part, by address."""
    return [pin for pin in with_account(home) if pin.contributor]


def with_account(home: Home) -> list[ServerPin]:
    """The hubs at which this home has an account, also one that it left: it still has what it earned."""
    pins = [ServerPin.read(path) for path in sorted(home.servers.glob("*.json"))]
    return [pin for pin in pins if pin.account]
