"""Members of a kind lie in its folder, or in one of the folders in it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_quant.registry import Registry

BASE = "class Base: pass\n"
MEMBER = "from {package}.base import Base\nclass Member(Base): pass\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of a name of its own, with one member beside a folder of two."""
    folder = tmp_path / f"kind_{tmp_path.name}".replace("-", "_")
    monkeypatch.syspath_prepend(str(tmp_path))
    member = MEMBER.format(package=folder.name)
    write(
        folder,
        {
            "__init__.py": "",
            "base.py": BASE,
            "plain.py": member,
            "family/__init__.py": "",
            "family/first.py": member,
            "family/second.py": member,
            "family/_shared.py": "",
            "_hidden/__init__.py": "",
            "_hidden/third.py": member,
        },
    )
    importlib.invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def registry(package: Path) -> Registry[object]:
    return Registry("member", package.name, f"{package.name}.base:Base", "gym_fed.members")


def test_files_of_a_folder_are_members_and_the_folder_is_none(package: Path) -> None:
    members = registry(package)
    assert members.own() == ("first", "plain", "second")
    assert not [name for name in sys.modules if name.startswith(package.name)], "names import nothing"
    assert members.type_of("first").__module__ == f"{package.name}.family.first"
    assert members.type_of("plain").__module__ == f"{package.name}.plain"


def test_two_files_of_one_name_are_refused(package: Path) -> None:
    write(package, {"other/__init__.py": "", "other/plain.py": MEMBER.format(package=package.name)})
    with pytest.raises(TypeError, match=r"plain is both .*\.other\.plain and .*\.plain"):
        registry(package).own()


def test_a_built_in_member_is_found_without_reading_the_entry_points() -> None:
    code = (
        "from gym_quant import registry\n"
        "assert 'bitdelta' in registry.CODECS\n"
        "assert registry._all_installed.cache_info().currsize == 0\n"
        "assert 'no such codec' not in registry.CODECS\n"
        "assert registry._all_installed.cache_info().currsize == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
