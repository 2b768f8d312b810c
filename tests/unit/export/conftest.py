"""Exports whose child processes have imported the project already."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _warm_children_of_exports(request: pytest.FixtureRequest) -> None:
    # One is about such children. In a fork, readers of programs miss what torch sets up in a process of its own.
    if request.module.__name__.rpartition(".")[2] not in ("test_export_process", "test_export_programs"):
        request.getfixturevalue("warm_children")
