"""Writes into each folder's `__init__` which neighbours it imports and which import it; `--check` only compares.

A neighbour is a folder or module beside it, in the same parent. Lazy and typing-only imports count.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("gym_fed", "server/gym_server", "client/gym_client", "quant/gym_quant")
SKIPPED = {"_generated", "__pycache__", "migrations", "assets"}
LINE = re.compile(r"\n\nNeighbours: [^\"]*?\.(?=\n?\"\"\")")


def folders(root: Path = ROOT) -> Iterator[Path]:
    """Every folder of modules below the packages themselves."""
    for package in PACKAGES:
        for init in sorted((root / package).rglob("__init__.py")):
            if init.parent != root / package and not SKIPPED.intersection(init.relative_to(root).parts):
                yield init.parent


@functools.cache
def imports(file: Path) -> tuple[str, ...]:
    """Dotted names of what a module imports, ``from a import b`` as ``a.b``."""
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@functools.cache
def neighbours(parent: Path, package: str) -> dict[str, set[str]]:
    """For each child of ``parent``, the children that it imports; ``package`` is the parent's dotted name."""
    children = {
        path.stem for path in parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted(parent.rglob("*.py")):
        if "_generated" in file.parts:
            continue
        own = file.relative_to(parent).parts[0].removesuffix(".py")
        for name in imports(file):
            if name.startswith(f"{package}."):
                other = name.removeprefix(f"{package}.").split(".")[0]
                if other != own and other in children and own != "__init__":
                    found[own].add(other)
    return found


def line(folder: Path) -> str:
    """The sentence of one folder."""
    top = next(path for path in folder.parents if not (path.parent / "__init__.py").exists())
    package = ".".join([top.name, *folder.parent.relative_to(top).parts])
    edges = neighbours(folder.parent, package)
    down = sorted(edges[folder.name])
    up = sorted(child for child, names in edges.items() if folder.name in names)
    return f"Neighbours: imports {', '.join(down) or 'none'}; imported by {', '.join(up) or 'none'}."


def text(folder: Path) -> str:
    """What the folder's ``__init__.py`` should be."""
    source = (folder / "__init__.py").read_text(encoding="utf-8")
    node = ast.parse(source).body[0]
    end = node.end_lineno or 1
    lines = source.splitlines(keepends=True)
    doc, rest = "".join(lines[:end]), "".join(lines[end:])
    doc = LINE.sub("", doc)
    body = doc.rstrip().removesuffix('"""').rstrip()
    return f'{body}\n\n{textwrap.fill(line(folder), 110)}\n"""\n{rest}'


def main() -> int:
    """Write, or with ``--check`` compare."""
    stale = [
        folder for folder in folders() if (folder / "__init__.py").read_text(encoding="utf-8") != text(folder)
    ]
    for folder in stale:
        if "--check" not in sys.argv:
            (folder / "__init__.py").write_text(text(folder), encoding="utf-8")
        print(folder.relative_to(ROOT) / "__init__.py")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
