"""Counts agree with their nouns in every message: ``1 credit``, never ``1 credits``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gym_fed.core.text import counted, counts_in_words

ROOT = Path(__file__).parents[3]
NOUNS = (
    "account adapter batch bit byte character checkpoint chunk column contributor core credit day delta device entry "
    "epoch example file head hour image installation item job key layer lease line machine message minute model node "
    "object other part participant position process prompt question reader receipt record request round row second "
    "sequence source step survivor task tensor time token transfer update upload value variant version vote weight word"
)
PLURALS = frozenset(counted(2, noun).split()[1] for noun in NOUNS.split())
IN_TEXT = re.compile(rf"\}} (?:{'|'.join(PLURALS)})\b")
CONSTANT = re.compile(r".*\b_?[A-Z][A-Z0-9_]+\b.*")
NO_COUNT = (
    "config.dtype config.optimizer kind options.quantization path.suffix place.name rows.kind split "
    "','.join(others) str(bits)[:20] plain(str(parts),40)"
)
MORE_THAN_ONE = (
    "base.num_parameters bits count draw.terms.rows in_words(num_weights) in_words(weights) "
    "len(after) len(matches) len(paths) len(second) len(text) n "
    "processes round(minutes/(24*60)) self._count self.secure.threshold total voters words"
)
"""Numbers that are never one where they are printed."""
EXEMPT = frozenset([*NO_COUNT.split(), *MORE_THAN_ONE.split()])


def messages_with_a_fixed_plural(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)) if IN_TEXT.search(source) else ():
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if not isinstance(value, ast.FormattedValue) or not isinstance(text, ast.Constant):
                continue
            noun = re.match(r" ([a-z]+)\b", str(text.value))
            is_whole = value.format_spec is None or ast.unparse(value.format_spec) == "f','"
            if noun is None or noun[1] not in PLURALS or not is_whole or value.conversion != -1:
                continue
            shown = ast.unparse(value.value)
            if not CONSTANT.fullmatch(shown) and shown.replace(" ", "") not in EXEMPT:
                yield f"{value.lineno}: {{{shown}}}{text.value}"


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (1, ["process"], "1 process"),
        (2, ["process"], "2 processes"),
        (2, ["match"], "2 matches"),
        (1, ["row", "are"], "1 row is"),
        (3, ["row", "have"], "3 rows have"),
        (1, ["source", "need"], "1 source needs"),
    ],
)
def test_noun_and_verb_agree_with_the_number(number: int, words: list[str], text: str) -> None:
    assert counted(number, *words) == text


def test_every_message_leaves_the_plural_of_a_count_to_counted() -> None:
    assert list(messages_with_a_fixed_plural('f"{n_found} rows"')), "the test can fail"
    folders = ("gym_fed", "client/gym_client", "server/gym_server")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 500
    fixed = {
        file.name: list(messages_with_a_fixed_plural(file.read_text(encoding="utf-8"))) for file in files
    }
    assert not {name: messages for name, messages in fixed.items() if messages}


def test_every_screen_leaves_the_plural_of_a_count_to_count() -> None:
    folders = ("gym_fed/web/static", "gym_fed/webui/screens", "server/gym_server/web/screens")
    files = [file for folder in folders for file in sorted((ROOT / folder).glob("*.js"))]
    assert len(files) > 30
    lines = [f"{file.name}: {line.strip()}" for file in files for line in file.read_text().splitlines()]
    assert not [line for line in lines if IN_TEXT.search(line)]


def test_counts_are_given_in_the_number_of_their_noun() -> None:
    counts = {"snapshots": 1, "objects": 8, "entries": 1, "sealed verdicts": 2000}
    assert counts_in_words(counts) == "1 snapshot, 8 objects, 1 entry, 2,000 sealed verdicts"
