"""What the tests of the hub share."""

from __future__ import annotations

import pytest
from gym_server.ledger.columns import ColumnChecks


@pytest.fixture
def updates_without_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates are put where admission leaves them, by contributors who have no keys and signed nothing."""
    put_without_admission(monkeypatch)


def put_without_admission(patch: pytest.MonkeyPatch) -> None:
    """Let the ledger's check leave updates out, until ``patch`` is undone."""
    patch.setattr(ColumnChecks, "_updates", lambda self, tx, history: None)
