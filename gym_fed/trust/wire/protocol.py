"""Check that both ends speak the same version of the wire contract."""

from __future__ import annotations

import re

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.limits import PROTOCOL
from gym_fed.version import __version__

UNNUMBERED = 1
"""The protocol of an end that sends no number."""

_VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]{0,31}", re.ASCII)
_HOW = "docs/install.md"
"""Where it is said how a release is got: there is none on PyPI."""


def require_hub(protocol: int, software_version: str) -> None:
    """Refuse a hub with another protocol version.

    Args:
        protocol: As the hub's status says it; 0 where it says none.
        software_version: Its version of gym-fed, as it says.

    Raises:
        GymError: ``PROTOCOL_MISMATCH`` with what to install.
    """
    theirs = protocol or UNNUMBERED
    if theirs == PROTOCOL:
        return
    known = _VERSION.fullmatch(software_version)
    version = software_version if known else "of an unknown version"
    same = f"gym-fed {software_version}" if known else "the version that the hub runs"
    raise GymError(
        ErrorCode.PROTOCOL_MISMATCH,
        f"this hub speaks protocol {theirs} (gym-fed {version}), "
        f"this contributor protocol {PROTOCOL} (gym-fed {__version__})",
        f"the hub is older: ask its coordinator to install gym-fed {__version__}, or join with {same} ({_HOW})"
        if theirs < PROTOCOL
        else f"install {same} on this machine ({_HOW})",
    )


def require_contributor(protocol: int) -> None:
    """Refuse a contributor with another protocol version at enrolment or login; raises as ``require_hub``."""
    theirs = protocol or UNNUMBERED
    if theirs == PROTOCOL:
        return
    raise GymError(
        ErrorCode.PROTOCOL_MISMATCH,
        f"this contributor speaks protocol {theirs}, the hub protocol {PROTOCOL} (gym-fed {__version__})",
        f"install gym-fed {__version__} on this machine ({_HOW})"
        if theirs < PROTOCOL
        else f"the hub is older: ask its coordinator to install the version of this machine ({_HOW})",
    )
