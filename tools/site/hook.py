"""Makes of docs/ a site that stands alone: pages from the root join it, and links that leave it become plain text.

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
"""Pages outside docs/ that repository hosts look for, and that readers of the site want too."""
_LINK = re.compile(r"(`+).+?\1|(?<!!)\[((?:[^\[\]]|`[^`]*`)*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make anchors of headings as hosts of repositories make them, since that is what our links name."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of the root and those that are built from the code."""
    root = Path(config.config_file_path).parent
    for name in FROM_THE_ROOT:
        files.append(File.generated(config, name, abs_src_path=str(root / name)))
    for name in BUILT_PAGES:
        files.append(File.generated(config, f"{name}.md", content=built_page(name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the site; what lies outside it keeps its words and loses its link."""
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [linked_within(part, page.file.src_uri, files) for part in parts[::2]]
    return "".join(parts)


def linked_within(text: str, page: str, files: Files) -> str:
    """One stretch of prose, with its links as the site needs them."""
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
