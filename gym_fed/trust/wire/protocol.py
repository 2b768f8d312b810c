"""Check that hub and contributor use the same version of the protocol."""

from __future__ import annotations

import re

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.limits import PROTOCOL
from gym_fed.version import __version__

_VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]{0,31}", re.ASCII)
_HOW = "docs/install.md"
"""Path of the install instructions in the repository, since there is no release on PyPI."""


def require_hub(protocol: int, software_version: str) -> None:
    """Reject a hub with a different protocol version.

    Args:
        protocol: The protocol version in the hub's status; 0 if it contains none.
        software_version: The hub's version of gym-fed, as reported by the hub.

    Raises:
        GymError: ``PROTOCOL_MISMATCH`` with the version to install.
    """
    if protocol == PROTOCOL:
        return
    known = _VERSION.fullmatch(software_version)
    version = software_version if known else "of an unknown version"
    same = f"gym-fed {software_version}" if known else "the version that the hub runs"
    raise GymError(
        ErrorCode.PROTOCOL_MISMATCH,
        f"this hub speaks protocol {protocol} (gym-fed {version}), "
        f"this contributor protocol {PROTOCOL} (gym-fed {__version__})",
        f"the hub is older: ask its coordinator to install gym-fed {__version__}, or join with {same} ({_HOW})"
        if protocol < PROTOCOL
        else f"install {same} on this machine ({_HOW})",
    )


def require_contributor(protocol: int) -> None:
    """Reject a contributor with a different protocol version at enrolment or login, like ``require_hub``."""
    if protocol == PROTOCOL:
        return
    raise GymError(
        ErrorCode.PROTOCOL_MISMATCH,
        f"this contributor speaks protocol {protocol}, the hub protocol {PROTOCOL} (gym-fed {__version__})",
        f"install gym-fed {__version__} on this machine ({_HOW})"
        if protocol < PROTOCOL
        else f"the hub is older: ask its coordinator to install the version of this machine ({_HOW})",
    )
