"""The site of docs/: it is built without a warning, fetches nothing from another host, and its links stay in it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from gym_fed.cli.docs import BUILT_PAGES
from tests.support.guides_site import build_site

ROOT = Path(__file__).resolve().parents[3]
pytest.importorskip("mkdocs", reason="MkDocs, of the extra dev, is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"))


@pytest.mark.slow  # builds the site, as make docs does
def test_every_page_is_in_the_site(site: Path) -> None:
    pages = [file.relative_to(ROOT / "docs").with_suffix(".html") for file in (ROOT / "docs").rglob("*.md")]
    html = [
        page.with_name("index.html") if page.name == "README.html" and len(page.parts) > 1 else page
        for page in pages
    ]
    html += [Path(f"{name}.html") for name in BUILT_PAGES]
    assert [str(page) for page in html if not (site / page).exists()] == []


@pytest.mark.slow  # builds the site, as make docs does
def test_no_page_fetches_anything_from_another_host(site: Path) -> None:
    fetched = r'<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)="?(https?:|//)'
    assert [f.name for f in site.rglob("*.html") if re.search(fetched, f.read_text(encoding="utf-8"))] == []
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*[\"']?https?:[^)]*", styles) == []


@pytest.mark.slow  # builds the site, as make docs does
def test_every_picture_of_a_page_is_in_the_site(site: Path) -> None:
    shown = {
        page.parent / picture.partition("#")[0]
        for page in site.rglob("*.html")
        for picture in re.findall(
            r'(?:src|srcset)="?([^"\s>]+\.(?:svg|png)[^"\s>]*)', page.read_text(encoding="utf-8")
        )
    }
    assert site / "casts" / "coordinator.svg" in shown
    assert [str(picture) for picture in shown if not picture.exists()] == []


@pytest.mark.slow  # builds the site, as make docs does
def test_search_works_from_a_file(site: Path) -> None:
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index")
    assert 'src="../javascripts/iframe-worker.js"' in (site / "decisions" / "index.html").read_text()


def hook() -> Any:
    spec = importlib.util.spec_from_file_location("site_hook", ROOT / "tools" / "site" / "hook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "text", "wanted"),
    [
        ("security.md", "[`a`](../tests/test_a.py), [b](keys.md#x)", "`a`, [b](keys.md#x)"),
        ("decisions/1.md", "[a](../keys.md), [b](../../README.md)", "[a](../keys.md), b"),
        ("CONTRIBUTING.md", "[a](docs/keys.md) and [b](https://x.y)", "[a](keys.md) and [b](https://x.y)"),
        ("decisions/1.md", "see `gym docs config`", "see [`gym docs config`](../config.md)"),
        ("index.md", "[a](../CONTRIBUTING.md), `[b](../tests)`", "[a](CONTRIBUTING.md), `[b](../tests)`"),
    ],
)
def test_a_link_out_of_the_site_keeps_its_words(page: str, text: str, wanted: str) -> None:
    class Files:
        def get_file_from_path(self, path: str) -> object:
            return path if path in ("keys.md", "CONTRIBUTING.md") else None

    assert hook().linked_within(text, page, Files()) == wanted
