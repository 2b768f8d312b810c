"""A federation of real processes for every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.federation import Federation
from tests.support.postgres import PostgresServer


@pytest.fixture
def federation(tmp_path: Path, tiny_base: Path) -> Iterator[Federation]:
    found = Federation(tmp_path, tiny_base)
    yield found
    found.close()


@pytest.fixture
def federation_on_postgres(tmp_path: Path, tiny_base: Path, postgres: PostgresServer) -> Iterator[Federation]:
    found = Federation(tmp_path, tiny_base, storage={"database": postgres.new_database()})
    yield found
    found.close()
