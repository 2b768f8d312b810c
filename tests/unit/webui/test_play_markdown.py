"""The Markdown of answers on the screen ``play``, as elements; run by Node.js without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gym_fed import webui
from tests.support.wait import SECONDS

SCREEN = Path(webui.__file__).parent / "screens" / "play_markdown.js"
ELEMENTS = """
export const el = (tag, attributes, content = [], ...more) => [tag, more.length ? [content, ...more] : content];
export const copyable = (text) => text;
"""
PROGRAM = """
import {markdown} from "./screens/play_markdown.js";
import {readFileSync} from "node:fs";
console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map((text) => markdown(text))));
"""

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")


def rendered(folder: Path, *texts: str) -> list[Any]:
    """The elements of each text: ``[tag, content]``."""
    for name, content in {
        "package.json": '{"type": "module"}',
        "static/app.js": ELEMENTS,
        "screens/play_markdown.js": SCREEN.read_text(),
        "main.js": PROGRAM,
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    done = subprocess.run(
        ["node", str(folder / "main.js")],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    found: list[Any] = json.loads(done.stdout)
    return found


def codes(answer: Any) -> list[str]:
    """The texts of inline code."""
    return [
        part[1] for _, content in answer for part in content if isinstance(part, list) and part[0] == "code"
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a `b` c", ["b"]),
        ("``b c`` and `d`", ["b c", "d"]),
        ("`**b**`", ["**b**"]),
        ("`open", []),
        ("a``b`c``d", []),  # a run of backticks is tried as a whole, or many runs take quadratic time
        ("``a`", []),
    ],
)
def test_inline_code_is_between_runs_of_as_many_backticks(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    (answer,) = rendered(tmp_path, text)
    assert codes(answer) == expected


def test_an_answer_of_the_maximum_length_in_backticks_stays_text(tmp_path: Path) -> None:
    text = f"x{'`' * 199_999}"
    assert rendered(tmp_path, text) == [[["p", [text]]]]


def test_lists_are_nested_by_their_indentation(tmp_path: Path) -> None:
    (answer,) = rendered(tmp_path, "1. one\n   - inner\n     more\n   - other\n2. two\n\n---\nend")
    assert answer == [
        ["ol", [["li", ["one", ["ul", [["li", ["inner\nmore"]], ["li", ["other"]]]]]], ["li", ["two"]]]],
        ["hr", []],
        ["p", ["end"]],
    ]


def test_a_table_has_the_columns_of_its_head(tmp_path: Path) -> None:
    (answer,) = rendered(tmp_path, "| a | b |\n|---|:-:|\n| `1` | <b> | x |\n| 2 |\n\na | b\nno table")
    ((tag, (kind, (head, body))), text) = answer
    assert (tag, kind) == ("div", "table")
    assert head == ["thead", ["tr", [["th", ["a"]], ["th", ["b"]]]]]
    first = ["tr", [["td", ["", ["code", "1"], ""]], ["td", ["<b>"]]]]
    assert body == ["tbody", [first, ["tr", [["td", ["2"]], ["td", [""]]]]]]
    assert text == ["p", ["a | b\nno table"]]


def test_deep_lists_and_wide_tables_are_bounded(tmp_path: Path) -> None:
    deep = "\n".join(f"{' ' * depth}- x" for depth in range(300))
    wide = f"{'a|' * 20_000}\n{'-|' * 20_000}\n{'b|' * 20_000}"
    lists, tables = rendered(tmp_path, deep, wide)
    assert json.dumps(lists).count('"ul"') <= 9
    assert json.dumps(tables).count('"th"') == 50


def test_tables_of_more_cells_than_a_page_holds_stay_text(tmp_path: Path) -> None:
    small, rows = f"{'a|' * 49}a\n|-\n", "|\n" * 300
    (answer,) = rendered(tmp_path, f"{small}{rows}\n{small}{rows}")
    assert [tag for tag, _ in answer] == ["div", "p"]
    (answer,) = rendered(tmp_path, f"{small}{'|' + chr(10)}" * 900)
    assert len(json.dumps(answer)) < 1_000_000
