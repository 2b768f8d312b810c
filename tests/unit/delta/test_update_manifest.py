"""What a contributor may sign of an update: numbers that every database and every language can hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.manifest import UpdateManifest, new_nonce

SAID: dict[str, Any] = {
    "contributor": "c" + "0" * 32,
    "server": "s" + "0" * 16,
    "task": "t",
    "server_round": 1,
    "base_digest": "sha256:" + "0" * 64,
    "delta_sha256": "0" * 64,
    "delta_bytes": 1,
    "issued_at_seconds": 1,
    "expires_at_seconds": 2,
    "num_examples": 1,
}


@pytest.mark.parametrize(
    "field", ["server_round", "delta_bytes", "issued_at_seconds", "expires_at_seconds", "num_examples"]
)
@pytest.mark.parametrize("number", [2**53, 2**63, 10**30, 10**400, -1, -(10**30)])
def test_a_number_that_no_database_holds_is_refused_by_its_field(field: str, number: int) -> None:
    with pytest.raises(GymError, match=f"manifest: {field}") as caught:
        UpdateManifest.parse(json.dumps({**SAID, "nonce": new_nonce(), field: number}))
    assert caught.value.code is ErrorCode.UPDATE_REFUSED


def test_the_largest_number_is_taken() -> None:
    UpdateManifest.parse(json.dumps({**SAID, "nonce": new_nonce(), "delta_bytes": 2**53 - 1}))
