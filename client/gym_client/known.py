"""A client of a hub that was joined before, for the commands that only ask or tell something."""

from __future__ import annotations

from gym_client.address import Address
from gym_client.home import Home
from gym_client.hub_keys import with_account
from gym_client.pins import ServerPin
from gym_client.transport import HubClient
from gym_client.trust import establish
from gym_fed.errors import ErrorCode, GymError


def enrolled_client(home: Home, server: str | None, insecure: bool) -> HubClient:
    """The client of a hub at which the home has an account.

    Raises:
        GymError: As ``address_of`` raises, ``UNAUTHENTICATED`` where the home has no account, and what ``establish``
            raises.
    """
    address = address_of(home, server)
    pin = ServerPin.load(home, address)
    if pin is None or not pin.contributor:
        raise GymError(
            ErrorCode.UNAUTHENTICATED,
            f"{home.folder} is not enrolled at {address}",
            f"gym-client join --server {address}",
        )
    insecure = insecure or not pin.fingerprint
    return HubClient(home, address, establish(home, address, None, lambda _: False, insecure))


def address_of(home: Home, server: str | None) -> Address:
    """The address that was given, or that of the one hub at which the home has an account.

    Raises:
        GymError: ``USAGE`` when none was given and there is not exactly one.
    """
    if server is not None:
        return Address.parse(server)
    known = [pin.address for pin in with_account(home)]
    if len(known) != 1:
        told = f"this home knows {', '.join(known)}" if known else f"{home.folder} was never joined to a hub"
        raise GymError(ErrorCode.USAGE, f"no server given, and {told}", "pass --server HOST")
    return Address.parse(known[0])
