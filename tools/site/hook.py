"""Build a self-contained site from docs/: pages from the root are added, and links to files outside become plain text.

MkDocs calls the functions by their names.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

from gym_fed.cli.docs import BUILT_PAGES, built_page

FROM_THE_ROOT = ("CONTRIBUTING.md", "SECURITY.md")
"""Pages outside docs/, where repository hosts expect them, that the site includes too."""
_LINK = re.compile(r"(`+).+?\1|(?<!!)\[((?:[^\[\]]|`[^`]*`)*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Derive the anchors of headings as GitHub does, since links use those."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages from the root and those that are built from the code."""
    root = Path(config.config_file_path).parent
    for name in FROM_THE_ROOT:
        files.append(File.generated(config, name, abs_src_path=str(root / name)))
    for name in BUILT_PAGES:
        files.append(File.generated(config, f"{name}.md", content=built_page(name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to pages of the site; a link to anything else becomes plain text."""
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [linked_within(part, page.file.src_uri, files) for part in parts[::2]]
    return "".join(parts)


def linked_within(text: str, page: str, files: Files) -> str:
    """Return a part of a page outside code blocks, with its links rewritten for the site."""
    here = dirname(page if page in FROM_THE_ROOT else join("docs", page))

    def link(found: re.Match[str]) -> str:
        words, target = found[2], found[3]
        if target is None or re.match(r"[a-z]+:|#", target):
            return found[0]
        path, _, anchor = target.partition("#")
        to = normpath(join(here, path)).removeprefix("docs/")
        if files.get_file_from_path(to) is None:
            return words
        return f"[{words}]({relpath(to, dirname(page) or '.')}{'#' + anchor if anchor else ''})"

    built = re.sub(
        rf"`gym docs ({'|'.join(BUILT_PAGES)})`(?!\])",
        lambda found: f"[{found[0]}]({relpath(f'{found[1]}.md', dirname(page) or '.')})",
        _LINK.sub(link, text),
    )
    return built
