"""Exports whose child processes have imported the project already."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _warm_children_of_exports(request: pytest.FixtureRequest) -> None:
    if request.module.__name__.rpartition(".")[2] != "test_export_process":  # it is about such children
        request.getfixturevalue("warm_children")
