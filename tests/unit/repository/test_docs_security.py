"""The threat model names tests, and they are there: docs/security.md against the suite."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "security.md"
HEAD = ["asset", "attacker", "control", "tested by"]
FEWEST_ROWS = 20
LINK = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)")


@cache
def rows() -> list[list[str]]:
    """Cells of every row of the threat model's tables."""
    text = PAGE.read_text(encoding="utf-8").split("## The threat model")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells.count(HEAD) >= 5
    return [row for row in cells if row != HEAD and set(row) != {"---"}]


def named() -> list[str]:
    """Node ids of all tests that the page names."""
    return sorted({f"{path}::{name}" for row in rows() for name, path in LINK.findall(row[3])})


def test_every_row_of_the_threat_model_has_an_asset_an_attacker_a_control_and_a_test() -> None:
    assert len(rows()) >= FEWEST_ROWS
    bad = [row for row in rows() if len(row) != 4 or not all(row) or not LINK.search(row[3])]
    assert bad == []


def test_what_holds_a_row_is_links_to_tests_and_nothing_else() -> None:
    left = {row[0]: LINK.sub("", row[3]).replace(",", "").strip() for row in rows()}
    assert {asset: rest for asset, rest in left.items() if rest} == {}


def test_every_test_that_the_threat_model_names_is_there() -> None:
    """What pytest collects of a file: its functions of this name. So one that is misspelt or moved is found."""
    assert [at for at in named() if at not in held_in(at.split("::")[0])] == []


@cache
def held_in(path: str) -> set[str]:
    """Node ids of a file, without their parameters."""
    file = ROOT / path
    if not file.is_file() or not file.name.startswith("test_"):
        return set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = (node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return {f"{path}::{name}" for name in found if name.startswith("test_")}


def test_the_policy_and_the_guides_lead_to_the_page() -> None:
    assert "docs/security.md" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "docs/security.md" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(security.md)" in (ROOT / "docs" / "coordinate.md").read_text(encoding="utf-8")


def test_the_policy_names_no_address_that_nobody_reads() -> None:
    assert re.findall(r"[\w.+-]+@[\w-]+\.\w+", (ROOT / "SECURITY.md").read_text(encoding="utf-8")) == []
