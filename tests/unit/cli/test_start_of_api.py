"""`gym api` while it loads: no garbage is collected, and what was loaded is never looked at again."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from gym_fed.cli.api.app import _without_collection


def test_nothing_is_collected_while_a_server_loads_and_what_it_loaded_is_never_looked_at_again() -> None:
    before = gc.get_freeze_count()
    try:
        with _without_collection():
            assert not gc.isenabled()
            kept: list[list[int]] = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()


def test_a_server_that_cannot_load_leaves_collection_on() -> None:
    try:
        with pytest.raises(OSError, match="no"), _without_collection():
            raise OSError("no")
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_server_listens_before_it_loads_torch() -> None:
    program = "import sys, gym_fed.serving.http.server; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"
