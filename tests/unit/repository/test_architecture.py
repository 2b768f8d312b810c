"""The picture and the file names of docs/architecture.md and docs/decisions/ are held to the code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from gym_fed.core.registries import ALL
from tools import architecture
from tools.architecture import ARROWS, BOXES, GROUND, PICTURE, ROOT, Arrow, path_of, picture

PAGES = [
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs" / name for name in ("architecture.md", "extending.md", "glossary.md", "index.md")),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
]
FILE = re.compile(
    r"`((?:gym_fed|server|client|quant|tests|benchmarks|proto|tools|configs|demo|docs|\.ci)/[^\s`:<>]*)`"
)


@cache
def imports(package: str) -> str:
    """All lines of a package that import something."""
    path = path_of(package)
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return "\n".join(line for line in lines if re.match(r"\s*(from|import) ", line))


def unmade(arrow: Arrow) -> list[str]:
    """Ends of an arrow that the package which makes the step neither is nor imports."""
    ends = [end for end in (arrow.start, arrow.end) if end != arrow.by]
    return [end for end in ends if not re.search(rf"\b{re.escape(end)}\b", imports(arrow.by))]


def missing(text: str) -> list[str]:
    """File names of a page, as patterns, that match nothing in the repository."""
    return [name for name in FILE.findall(text) if not any(ROOT.glob(name.rstrip("/")))]


def test_the_picture_of_the_architecture_is_what_its_tables_draw() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run: python tools/architecture.py"


@pytest.mark.parametrize("box", [*BOXES, *GROUND], ids=lambda box: box.module)
def test_a_box_of_the_picture_names_a_module_that_exists(box: architecture.Box) -> None:
    assert path_of(box.module).exists()


def test_an_arrow_within_a_process_is_made_by_a_package_that_imports_both_ends() -> None:
    inside = [arrow for arrow in ARROWS if path_of(arrow.by).exists() and "/" not in arrow.by]
    assert len(inside) == len(ARROWS) - 4  # two of gRPC, one of a folder, one of HTTP
    assert {(a.start, a.end): unmade(a) for a in inside if unmade(a)} == {}


def test_an_arrow_between_parts_that_know_nothing_of_each_other_is_found() -> None:
    assert unmade(Arrow("gym_fed.delta", "gym_server.rpc", "", "gym_fed.delta")) == ["gym_server.rpc"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_file_names_on_a_page_exist(page: Path) -> None:
    assert missing(page.read_text(encoding="utf-8")) == []


def test_a_file_name_that_is_gone_is_found() -> None:
    assert missing("`gym_fed/soup/gone.py` and `gym_fed/soup/rule.py`") == ["gym_fed/soup/gone.py"]


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/decisions/README.md"])
def test_a_page_counts_the_members_of_a_kind_as_the_registry_does(page: str) -> None:
    members = {kind.kind.replace("optimizer", "optimiser"): len(kind.own()) for kind in ALL}
    text = (ROOT / page).read_text(encoding="utf-8")
    counted = re.findall(rf"\b(\d+) ({'|'.join(members)})s\b", text)
    assert counted
    assert {kind: int(count) for count, kind in counted} == {kind: members[kind] for _, kind in counted}
