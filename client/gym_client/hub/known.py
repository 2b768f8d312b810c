"""Create clients for hubs that this home already knows."""

from __future__ import annotations

from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.pins import LAST_SERVER, ServerPin, with_account
from gym_client.identity.trust import establish
from gym_fed.core.errors import ErrorCode, GymError


def enrolled_client(home: Home, server: str | None, insecure: bool, may_have_left: bool = False) -> HubClient:
    """Create the client for a hub where the home has an account.

    Args:
        home: The contributor's home.
        server: Address of the hub; None for the only known hub.
        insecure: Use plain text, without TLS.
        may_have_left: Accept an account that has left the hub, too; its balance can still be read.

    Raises:
        GymError: ``UNAUTHENTICATED`` if the home has no account; errors from ``address_of`` and ``establish``.
    """
    address = address_of(home, server)
    pin = ServerPin.load(home, address)
    if pin is None or not (pin.account if may_have_left else pin.contributor):
        left = pin is not None and bool(pin.left)
        raise GymError(
            ErrorCode.UNAUTHENTICATED,
            f"{home.folder} {'has left' if left else 'is not enrolled at'} {address}",
            f"gym-client join --server {address}",
        )
    insecure = insecure or not pin.fingerprint
    return HubClient(home, address, establish(home, address, None, lambda _: False, insecure))


def address_of(home: Home, server: str | None) -> Address:
    """Return the given address, or that of the only hub where the home has an account.

    Raises:
        GymError: ``USAGE`` with a list of hubs if no address was given and there is not exactly one.
    """
    if server is not None:
        return Address.parse(server)
    known = with_account(home)
    if len(known) != 1:
        problem = (
            f"this home has accounts at {_listed(home, known)}"
            if known
            else f"{home.folder} has never joined a hub"
        )
        raise GymError(ErrorCode.USAGE, f"no server given, and {problem}", "pass --server HOST")
    return Address.parse(known[0].address)


def last_address(home: Home) -> Address | None:
    """Return the hub that ``join`` uses by default: the last one, or the only one with an account.

    Raises:
        GymError: ``USAGE`` if there are several, and the last one is unknown.
    """
    last = home.settings().get(LAST_SERVER)
    if last:
        return Address.parse(str(last))
    return address_of(home, None) if with_account(home) else None


def _listed(home: Home, pins: list[ServerPin]) -> str:
    last = home.settings().get(LAST_SERVER)
    lines = []
    for pin in pins:
        notes = [pin.name] if pin.name else []
        notes += ["left"] if not pin.contributor else []
        notes += ["joined last"] if pin.address == last else []
        lines.append(f"{pin.address} ({', '.join(notes)})" if notes else pin.address)
    return ", ".join(lines)
