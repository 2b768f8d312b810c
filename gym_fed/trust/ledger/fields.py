"""The fields of ledger entries that readers depend on, and their types.

A signature proves who wrote an entry, but not that its body is well-formed; a hub can sign anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gym_fed.trust.ledger.entries import SEALED, Entry, corrupt
from gym_fed.trust.ledger.lineage import VERSION

_MAX_WHOLE = 2**63


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_whole(value: object) -> bool:
    return type(value) is int and abs(value) < _MAX_WHOLE


def _is_size(value: object) -> bool:
    return _is_whole(value) and value >= 0  # type: ignore[operator]


def _are_amounts(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_whole, value.values()))


def _is_sum(value: object) -> bool:
    return (
        isinstance(value, dict)
        and _is_text(value.get("digest"))
        and _is_text(value.get("sum"))
        and _is_size(value.get("sum_bytes"))
    )


_Check = Callable[[object], bool]
_CREDITED: Mapping[str, _Check] = {"server_round": _is_whole, "contributor": _is_text, "amount": _is_whole}
_OF_ACCOUNT: Mapping[str, _Check] = {"contributor": _is_text}
_TRANSFERRED: Mapping[str, _Check] = {
    "transfer": _is_text,
    "from": _is_text,
    "to": _is_text,
    "amount": _is_size,
}
_REQUIRED: Mapping[str, Mapping[str, _Check]] = {
    "enrolled": _OF_ACCOUNT,
    "rebound": _OF_ACCOUNT,
    "left": _OF_ACCOUNT,
    "revoked": _OF_ACCOUNT,
    "credit": _CREDITED,
    "transfer": _TRANSFERRED,
    "transfer-settled": _TRANSFERRED,
    "transfer-cancelled": _TRANSFERRED,
    "royalty": {"usage": _is_text, "shares": _are_amounts, "amount": _is_whole},
    "verdict": {"contributor": _is_text, "verdict": _is_text},
    SEALED: {"seal": _is_text},
    VERSION: {
        "server_round": _is_whole,
        "height": _is_whole,
        "digest": _is_text,
        "parent": _is_text,
        "soup": _is_text,
        "soup_bytes": _is_size,
    },
    "variant": {"contributor": _is_text, "variant": _is_text, "document": _is_text},
    "variant-removed": {"contributor": _is_text, "variant": _is_text},
}
_OPTIONAL: Mapping[str, Mapping[str, _Check]] = {
    "verdict": {"update": _is_text, "server_round": _is_whole},
    VERSION: {"integers": _is_sum},
}


def check_fields(entry: Entry, body: Mapping[str, Any]) -> None:
    """Check the fields of an entry; kinds and fields that no reader depends on are skipped.

    Raises:
        GymError: ``STATE_CORRUPT`` with the entry and its first field that is missing or of the wrong type.
    """
    required, optional = _REQUIRED.get(entry.kind, {}), _OPTIONAL.get(entry.kind, {})
    for name, is_valid in (*required.items(), *optional.items()):
        if name not in body and name in optional:
            continue
        if not is_valid(body.get(name)):
            raise corrupt(f"entry {entry.sequence} ({entry.kind}): {name} is missing or has the wrong type")
