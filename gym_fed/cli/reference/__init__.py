"""Reference pages that are built from the code of this installation: `gym docs config`, and the site of the guides."""

from __future__ import annotations

import importlib

BUILT_PAGES = ("config", "api", "aliases", "members")
"""Names of the pages; each is a module of this package with a function ``page``."""


def built_page(name: str) -> str:
    """The Markdown of one page of ``BUILT_PAGES``."""
    text: str = importlib.import_module(f"{__name__}.{name}").page()
    return text
