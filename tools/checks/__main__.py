"""Report retired words, classes that share a name, a long README, long sentences and dead links.

``python -m tools.checks`` prints all violations, and exits with 1 if there are any.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.checks.classes import repeated_classes
from tools.checks.files import Finding, text_files
from tools.checks.pages import dead_links, long_readme, long_sentences, slow_pages
from tools.checks.words import retired_words

ROOT = Path(__file__).resolve().parents[2]


def all_findings(root: Path) -> list[Finding]:
    """Return all violations below ``root``."""
    files = text_files(root)
    return [
        *retired_words(files),
        *repeated_classes(files),
        *long_readme(files),
        *long_sentences(files),
        *slow_pages(files),
        *dead_links(files, root),
    ]


def main() -> int:
    """Print all violations, and return the exit status."""
    findings = all_findings(ROOT)
    print(*findings, sep="\n", end="\n" if findings else "")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
