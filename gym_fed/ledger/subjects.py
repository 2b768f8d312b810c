"""Whom an entry of a ledger names."""

from __future__ import annotations

import re

from gym_fed.identity.keys import CONTRIBUTOR_PATTERN

_CONTRIBUTOR = re.compile(f'"({CONTRIBUTOR_PATTERN})"', re.ASCII)


def subjects(body_json: str) -> set[str]:
    """Ids of the contributors in an entry's body, wherever they stand in it."""
    return set(_CONTRIBUTOR.findall(body_json))
