"""Shared folders of the suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.made_once import made_once


def test_a_shared_folder_whose_making_failed_is_made_again_from_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    calls = []

    def make(folder: Path) -> None:
        calls.append(list(folder.iterdir()))
        (folder / "first").touch()
        if len(calls) == 1:
            raise RuntimeError("a deadline was exceeded")

    with pytest.raises(RuntimeError):
        made_once(tmp_path_factory, "master", "shared-folder", make)
    folder = made_once(tmp_path_factory, "master", "shared-folder", make)
    assert made_once(tmp_path_factory, "master", "shared-folder", make) == folder
    assert calls == [[], []]
    assert (folder / "first").exists()
