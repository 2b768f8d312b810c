"""Common dataset licences by SPDX identifier (spdx.org/licenses)."""

from __future__ import annotations

import difflib
import re

from gym_fed.core.errors import ErrorCode, GymError

KNOWN = (
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "C-UDA-1.0",
    "CC-BY-2.0",
    "CC-BY-3.0",
    "CC-BY-4.0",
    "CC-BY-NC-2.0",
    "CC-BY-NC-3.0",
    "CC-BY-NC-4.0",
    "CC-BY-NC-ND-4.0",
    "CC-BY-NC-SA-3.0",
    "CC-BY-NC-SA-4.0",
    "CC-BY-ND-4.0",
    "CC-BY-SA-3.0",
    "CC-BY-SA-4.0",
    "CC-PDDC",
    "CC0-1.0",
    "CDLA-Permissive-1.0",
    "CDLA-Permissive-2.0",
    "CDLA-Sharing-1.0",
    "ECL-2.0",
    "EUPL-1.2",
    "GFDL-1.3-or-later",
    "GPL-2.0-only",
    "GPL-2.0-or-later",
    "GPL-3.0-only",
    "GPL-3.0-or-later",
    "ISC",
    "LGPL-3.0-or-later",
    "MIT",
    "MIT-0",
    "MPL-2.0",
    "O-UDA-1.0",
    "ODC-By-1.0",
    "ODbL-1.0",
    "OGL-UK-3.0",
    "PDDL-1.0",
    "Unlicense",
    "etalab-2.0",
)
_OWN = re.compile(r"LicenseRef-[A-Za-z0-9.-]+")


def checked_licence(text: str | None) -> str:
    """Normalise ``text`` to SPDX identifiers, which may be joined by AND or OR.

    Raises:
        GymError: ``USAGE`` for none and for one that is not known.
    """
    if text is None or not text.strip():
        raise GymError(
            ErrorCode.USAGE,
            "licence: not given",
            "name it, such as CC-BY-4.0; one without an SPDX identifier is called LicenseRef-NAME",
        )
    parts = re.split(r"\s+(AND|OR)\s+", text.strip())
    by_lower = {name.lower(): name for name in KNOWN}
    for at in range(0, len(parts), 2):
        if _OWN.fullmatch(parts[at]):
            continue
        known = by_lower.get(parts[at].lower())
        if known is None:
            close = difflib.get_close_matches(parts[at].lower(), by_lower, n=3, cutoff=0.5)
            meant = f"perhaps {', '.join(by_lower[name] for name in close)}; " if close else ""
            raise GymError(
                ErrorCode.USAGE,
                f"licence: {parts[at]!r} is no SPDX identifier known here",
                f"{meant}what has no identifier is called LicenseRef-NAME",
            )
        parts[at] = known
    return " ".join(parts)
