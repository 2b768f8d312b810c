"""`gym docs`: the guides that came with this installation, in a browser or in the terminal, without a network."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated

import typer

from gym_fed.cli.reference import BUILT_PAGES, built_page
from gym_fed.core.console import AsJson, out, print_result
from gym_fed.core.errors import ErrorCode, GymError

_PACKAGE = Path(__file__).parents[1]
_PAGES = (_PACKAGE / "assets" / "docs", _PACKAGE.parent / "docs")
_SITES = (_PACKAGE / "assets" / "site", _PACKAGE.parent / "build" / "site")
"""In an installed package, and in a checkout; sites are there where MkDocs was when they were built."""


def docs(
    page: Annotated[
        str, typer.Argument(help="A page: train, quickstart, glossary, decisions/README, ...")
    ] = "index",
    print_page: Annotated[bool, typer.Option("--print", help="Print the page to the terminal.")] = False,
    open_page: Annotated[
        bool | None, typer.Option("--open/--no-open", help="Open the browser; the default on a terminal.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Open the guides of this version, or print one in the terminal; no network is used.

    The reference pages config, api, aliases and members are built from the code: without a site they are printed.
    """
    name = _page_name(page)
    html = re.sub(r"/README$", "/index", name) + ".html"  # MkDocs' name for the first page of a folder
    file = next((folder / html for folder in _SITES if (folder / html).is_file()), None)
    source = None if name in BUILT_PAGES else _folder() / f"{name}.md"
    url = shown.resolve().as_uri() if (shown := file or source) else None
    if as_json:
        print_result(True, {"page": name, "url": url, "file": str(source) if source else None})
    elif print_page or url is None:
        _print(
            source.read_text(encoding="utf-8") if source else re.sub(r"(?m)^::: .+\n\n", "", built_page(name))
        )
    else:
        out.print(url)
        if open_page or (open_page is None and out.is_terminal):
            import webbrowser

            webbrowser.open(url)


def _page_name(page: str) -> str:
    """The page's path below docs/, without its ending."""
    folder = _folder()
    names = sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.md"))
    names += BUILT_PAGES
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3) or names
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"no page is called {page!r}", f"is it one of {', '.join(close)}?"
        )
    return name


def _folder() -> Path:
    folder = next((folder for folder in _PAGES if folder.is_dir()), None)
    if folder is None:
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"no guides in {_PAGES[0]}", "install gym-fed again; its wheel has them"
        )
    return folder


def _print(text: str) -> None:
    if not out.is_terminal:
        typer.echo(text, nl=False)
        return
    from rich.markdown import Markdown

    out.print(Markdown(text, hyperlinks=False), soft_wrap=False)
