"""Check that pages are readable: a short README, short sentences, and links whose targets exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath
from statistics import mean

from tools.checks.files import Finding

README_WORDS = 900
SENTENCE_WORDS = 25
MEAN_WORDS = 15
CODE = "```"

Blocks = list[tuple[int, str]]


def prose(text: str) -> Blocks:
    """Return paragraphs, list items, headings and table cells, each with its first line's number, without code."""
    blocks: Blocks = []
    open_code = fresh = False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith(CODE):
            open_code, fresh = not open_code, True
        elif open_code or not line or line.startswith("<!--") or re.fullmatch(r"[|:\- ]+", line):
            fresh = True
        elif line.startswith("|"):
            blocks += [(number, cell) for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
            fresh = True
        elif fresh or not blocks or re.match(r"(#+|[-*+]|\d+\.|>|!\[)\s?", line):
            blocks.append((number, line))
            fresh = line.startswith("#")
        else:
            first, before = blocks[-1]
            blocks[-1] = (first, f"{before} {line}")
    return blocks


def plain(block: str) -> str:
    """Return the text as read: a link counts as its text, an image as its alternative text, and code as one word."""
    text = re.sub(r"<!--.*?-->", "", block)
    text = re.sub(r'<img [^>]*alt="([^"]*)"[^>]*>', r"\1", text)
    text = re.sub(r"</?(?:picture|source)[^>]*>", "", text)
    text = re.sub(r"(`+).+?\1", "Code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"^(#+|[-*+]|\d+\.|>)\s+", "", text)


def sentences(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the words of every sentence, with the line number of its block."""
    for number, block in prose(text):
        for sentence in re.split(r"(?<=[.!?])[)\"*_]*\s+(?=[\"(*_]*[A-Z0-9])", plain(block)):
            if words := re.findall(r"\w[\w'’.,/+-]*", sentence):
                yield number, words


def pages(files: dict[str, str]) -> dict[str, str]:
    """Return the pages in docs/ and the README."""
    return {f: text for f, text in files.items() if f == "README.md" or re.fullmatch(r"docs/.+\.md", f)}


def long_sentences(files: dict[str, str]) -> Iterator[Finding]:
    """Yield the sentences of the pages that are too long."""
    for file, text in pages(files).items():
        for number, words in sentences(text):
            if len(words) > SENTENCE_WORDS:
                start = " ".join(words[:6])
                message = f"a sentence of {len(words)} words, {SENTENCE_WORDS} at most: {start} ..."
                yield Finding(file, number, message)


def mean_length(text: str) -> float:
    """Return the mean number of words per sentence; headings and cells of up to three words do not count."""
    lengths = [len(words) for _, words in sentences(text) if len(words) > 3]
    return mean(lengths) if lengths else 0.0


def slow_pages(files: dict[str, str]) -> Iterator[Finding]:
    """Yield the pages whose sentences are too long on average."""
    for file, text in pages(files).items():
        if (length := mean_length(text)) > MEAN_WORDS:
            message = f"sentences of {length:.1f} words on average, {MEAN_WORDS} at most"
            yield Finding(file, 1, message)


def long_readme(files: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding for every word of the README above the limit, code and tables included."""
    count = len(files.get("README.md", "").split())
    for _ in range(count - README_WORDS):
        yield Finding("README.md", 1, f"{count} words, {README_WORDS} at most: move some to docs/")


def anchors(text: str) -> set[str]:
    """Return the anchors that links may use, as GitHub derives them from headings."""
    found: set[str] = set()
    for _, block in prose(text):
        if block.startswith("#"):
            title = re.sub(r"[`*]|!?\[([^\]]*)\]\([^)]*\)", r"\1", block.lstrip("# "))
            slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            found.add(slug if slug not in found else f"{slug}-1")
    return found | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


def links(text: str) -> Iterator[tuple[int, str]]:
    """Yield the relative link targets of a page with their line numbers; code is skipped."""
    open_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith(CODE):
            open_code = not open_code
        elif not open_code:
            for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", re.sub(r"(`+).+?\1", "", line)):
                if not re.match(r"[a-z]+:", target):
                    yield number, target


def dead_links(files: dict[str, str], root: Path) -> Iterator[Finding]:
    """Yield relative links to files or headings that do not exist."""
    pages = {file: text for file, text in files.items() if file.endswith(".md")}
    for file, text in pages.items():
        for number, target in links(text):
            name, _, anchor = target.partition("#")
            to = normpath(join(dirname(file), name)) if name else file
            if not (root / to).exists():
                yield Finding(file, number, f"broken link {target}: there is no {to}")
            elif anchor and to in pages and anchor not in anchors(pages[to]):
                yield Finding(file, number, f"broken link {target}: {to} has no such heading")
