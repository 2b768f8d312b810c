"""Refuses retired words, classes that share a name, a long README, long sentences, dead links and unlinked pages.

python -m tools.checks            what breaks a rule, and exit status 1 where something does
python -m tools.checks --report   counts a folder, and the mean length of each page's sentences
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tools.checks.classes import repeated_classes
from tools.checks.files import Finding, room, text_files
from tools.checks.pages import (
    dead_links,
    long_readme,
    long_sentences,
    mean_length,
    pages,
    slow_pages,
    unlinked_pages,
)
from tools.checks.words import retired_words

ROOT = Path(__file__).resolve().parents[2]


def all_findings(root: Path) -> list[Finding]:
    """Everything that breaks a rule under ``root``."""
    files = text_files(root)
    return [
        *retired_words(files),
        *repeated_classes(files),
        *long_readme(files),
        *long_sentences(files),
        *slow_pages(files),
        *dead_links(files, root),
        *unlinked_pages(files),
    ]


def report(root: Path, findings: list[Finding]) -> None:
    """Print counts: retired words by folder and by word, and the pages' sentences."""
    words = [f for f in findings if f.rule == "words"]
    for title, counts in (
        ("retired words, by folder", Counter(room(f.file) for f in words)),
        ("retired words, by word", Counter(f.message.split("'")[1].lower() for f in words)),
        ("other findings, by rule", Counter(f.rule for f in findings if f.rule != "words")),
    ):
        print(f"{title}: {counts.total()}")
        print("".join(f"{count:7} {name}\n" for name, count in counts.most_common()))
    print("mean length of a page's sentences, in words")
    for file, text in pages(text_files(root)).items():
        print(f"{mean_length(text):7.1f} {file}")


def main(arguments: list[str]) -> int:
    """The exit status."""
    findings = all_findings(ROOT)
    if "--report" in arguments:
        report(ROOT, findings)
        return 0
    print(*findings, sep="\n", end="\n" if findings else "")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
