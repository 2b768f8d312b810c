"""Whom an entry of a ledger names."""

from __future__ import annotations

import re

_CONTRIBUTOR = re.compile(r'"(c[0-9a-f]{16})"', re.ASCII)


def subjects(body_json: str) -> set[str]:
    """Ids of the contributors in an entry's body, wherever they stand in it."""
    return set(_CONTRIBUTOR.findall(body_json))
