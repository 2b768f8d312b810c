"""Malformed entries under valid signatures: a ledger of a hostile hub is refused by entry and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.ledger.export import verify_file
from gym_fed.trust.regions.links import RegionLinks
from tests.fuzz.ledgers import entries_of, export, signed_export


def altered(kind: str, changes: dict[str, Any], *, without: str = "") -> bytes:
    """The valid export, with changes in its last entry of this kind, hashed and signed again."""
    entries, heads = entries_of(export())
    at = max(number for number, (found, _) in enumerate(entries) if found == kind)
    body = {**entries[at][1], **changes}
    body.pop(without, None)
    entries[at] = (kind, body)
    return signed_export(entries, heads)


def refused(data: bytes, folder: Path, visit: Any = lambda entry, body: None) -> str:
    file = folder / "ledger.jsonl"
    file.write_bytes(data)
    with pytest.raises(GymError) as caught:
        verify_file(file, None, visit)
    assert caught.value.code is ErrorCode.STATE_CORRUPT
    return caught.value.message


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("version", "server_round", [1]),
        ("version", "soup_bytes", "9"),
        ("version", "soup_bytes", -1),
        ("version", "parent", {}),
        ("version", "integers", {"digest": "0" * 64, "sum": "0" * 64}),
        ("credit", "amount", "5"),
        ("credit", "amount", 2.5),
        ("credit", "amount", 10**400),
        ("credit", "amount", True),
        ("transfer", "amount", 5.0),
        ("transfer-settled", "amount", 5.0),
        ("transfer-settled", "to", None),
        ("enrolled", "contributor", {}),
        ("royalty", "shares", {"c": None}),
        ("verdict", "update", ["0" * 64]),
        ("sealed", "seal", []),
        ("variant", "document", {}),
    ],
)
def test_a_signed_entry_with_a_field_of_another_type_is_refused_by_its_name(
    kind: str, field: str, value: Any, tmp_path: Path
) -> None:
    message = refused(altered(kind, {field: value}), tmp_path)
    assert f"({kind}): {field} is missing or has the wrong type" in message


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("version", "server_round"),
        ("version", "soup_bytes"),
        ("version", "parent"),
        ("credit", "amount"),
        ("variant-removed", "variant"),
        ("sealed", "seal"),
    ],
)
def test_a_signed_entry_without_a_field_is_refused_by_its_name(kind: str, field: str, tmp_path: Path) -> None:
    assert f"({kind}): {field} is missing" in refused(altered(kind, {}, without=field), tmp_path)


def test_a_hold_period_beyond_every_float_is_a_malformed_entry(tmp_path: Path) -> None:
    for kind in ("revoked", "transfer"):
        assert f"a malformed entry of kind {kind} (OverflowError)" in refused(
            altered(kind, {"hold_seconds": 10**400}), tmp_path
        )


@pytest.mark.parametrize(
    ("changes", "without"),
    [
        ({"version": [1]}, ""),
        ({"integers": 5}, ""),
        ({"version": "sha256:another"}, ""),  # without the digest of a sum
        ({"root_size": "1"}, ""),
        ({}, "base"),
        ({}, "root_size"),
    ],
)
def test_a_link_to_a_root_with_a_malformed_field_is_refused_when_it_is_read(
    changes: dict[str, Any], without: str, tmp_path: Path
) -> None:
    links = RegionLinks()

    def visit(entry: Entry, body: dict[str, Any]) -> None:
        links.add(entry, body)

    assert "(root-version) is malformed" in refused(
        altered("root-version", changes, without=without), tmp_path, visit
    )
