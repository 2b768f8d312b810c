"""A client of a hub that was joined before, for the commands that only ask or tell something."""

from __future__ import annotations

from gym_client.address import Address
from gym_client.home import Home
from gym_client.pins import ServerPin
from gym_client.transport import HubClient
from gym_client.trust import establish
from gym_fed.errors import ErrorCode, GymError


def enrolled_client(home: Home, server: str | None, insecure: bool) -> HubClient:
    """The client of a hub at which the home has an account.

    Raises:
        GymError: ``USAGE`` without a server, ``UNAUTHENTICATED`` where the home has no account, and what
            ``establish`` raises.
    """
    if server is None:
        raise GymError(ErrorCode.USAGE, "no server given", "pass --server HOST")
    address = Address.parse(server)
    pin = ServerPin.load(home, address)
    if pin is None or not pin.contributor:
        raise GymError(
            ErrorCode.UNAUTHENTICATED,
            f"{home.folder} is not enrolled at {address}",
            f"gym-client join --server {address}",
        )
    insecure = insecure or not pin.fingerprint
    return HubClient(home, address, establish(home, address, None, lambda _: False, insecure))
