"""Paths of untrusted origin: what leaves the folder that they are joined to, on Linux or on Windows, is refused."""

from __future__ import annotations

from pathlib import PureWindowsPath
from typing import Any

import pytest
from gym_server.backup.place import SnapshotManifest

from gym_fed.core.errors import GymError
from gym_fed.core.files import is_safe_path
from gym_fed.data.registry import DatasetFile
from gym_fed.registry.manifest import ModelFile

SHA256 = "0" * 64
OUTSIDE = (
    *("", ".", "..", "/", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a/."),
    *("C:\\x", "C:x", "c:/x", "\\\\server\\share", "\\x", "a\\..\\..\\x", "//server/share", "\\\\?\\C:\\x"),
    *("a:b", "keys/ledger.pem:stream", "::$DATA"),
    *("NUL", "nul.txt", "keys/con", "COM1", "lpt9.yaml", "aux .txt", "PRN.tar.gz", "com¹", "CONIN$"),
    *("a.", "a ", "keys./x", "... ", "a\x00b", "a\nb", "a\u202eb", "x" * 256, "a/" * 600 + "a"),
)
INSIDE = (
    "a",
    "a/b.c",
    "keys/ledger.pem",
    ".hidden",
    "console.py",
    "auxiliary",
    "com10",
    "nullable.json",
    "ä/ö",
    "a b",
)


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_that_leaves_its_folder_on_any_system_is_refused(path: str) -> None:
    assert not is_safe_path(path)


@pytest.mark.parametrize("path", INSIDE)
def test_an_ordinary_path_is_accepted_and_stays_inside_on_windows(path: str) -> None:
    assert is_safe_path(path)
    folder = PureWindowsPath("C:/hub")
    assert (folder / path).is_relative_to(folder)


def snapshot(path: str) -> None:
    file = {"sha256": SHA256, "size_bytes": 1}
    SnapshotManifest.from_dict(
        {
            "server": "s" + "0" * 16,
            "created_at": 1,
            "software_version": "1",
            "head": None,
            "files": {path: file},
            "objects": {},
        }
    )


@pytest.mark.parametrize(
    "path", ["C:\\x.safetensors", "\\\\server\\x.safetensors", "nul.safetensors", "a:x.safetensors"]
)
@pytest.mark.parametrize(
    "read",
    [
        snapshot,
        lambda path: ModelFile(path=path, sha256=SHA256, num_bytes=1),
        lambda path: DatasetFile(path=path, sha256=SHA256, num_bytes=1),
    ],
    ids=["backup", "model", "dataset"],
)
def test_every_manifest_refuses_windows_paths_by_name(read: Any, path: str) -> None:
    with pytest.raises((GymError, ValueError)) as refused:
        read(path)
    assert "path" in str(refused.value) or "folder" in str(refused.value)
    read("a.json")
