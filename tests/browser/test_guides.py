"""The site of the guides, opened from a file as `gym docs` opens it: search, greys, no request beyond the folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import chromium
from tests.support.guides_site import build_site

pytest.importorskip("mkdocs", reason="MkDocs, of the extra dev, is not installed")
PAGES = ("index", "quickstart", "api", "config", "extending")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"))


@pytest.mark.slow  # builds the site, ten seconds
def test_search_finds_a_page_without_a_server(site: Path, open_page: Callable[..., Any]) -> None:
    page, watch = open_page()
    watch.allowed.append(r"another host: file://")
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("s")
    page.keyboard.type("secure aggregation")
    page.wait_for_selector(".md-search-result__item h1:has-text('Secure aggregation')")
    assert all(url.startswith(site.as_uri()) for url in watch.requests)


@pytest.mark.slow  # as above
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_of_the_site_are_grey(site: Path, scheme: str, open_page: Callable[..., Any]) -> None:
    page, watch = open_page(color_scheme=scheme)
    watch.allowed.append(r"another host: file://")
    for name in PAGES:
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_selector("h1")
        assert chromium.most_colourful(page.screenshot()) <= 8, name
