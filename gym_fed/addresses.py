"""Which network a caller belongs to, for limits per address: of the hub and of ``gym api`` alike."""

from __future__ import annotations

import ipaddress


def network_of(host: str) -> str:
    """The IPv4 address itself, also of one that is written as IPv6; of an IPv6 one its /64, which one household has.

    Raises:
        ValueError: For what is no address.
    """
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
