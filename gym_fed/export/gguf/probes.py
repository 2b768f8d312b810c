"""Ten thousand short texts on which two tokenizers are compared: the same ones on every machine."""

from __future__ import annotations

import random
import unicodedata
from functools import cache

COUNT = 10_000
_SEED = 20240517
_WORDS = (
    *("the", "Water", "harbour", "CamelCase", "snake_case", "iPhone", "naïve", "Straße", "Ελλάδα", "привет"),
    *("МОСКВА", "שלום", "مرحبا", "नमस्ते", "สวัสดี", "한국어", "こんにちは", "カタカナ", "漢字", "工作", "café"),
    *(
        "résumé",
        "ﬁne",
        "Ǆ",
        "ªº",
        "x²",
        "H₂O",
        "½",
        "Ⅷ",
        "٣٤",
        "e\u0301",
        "👍",
        "👩\u200d👩\u200d👧",
        "🏳️\u200d🌈",
    ),
)
_CONTRACTIONS = (
    "I'm",
    "you're",
    "WE'VE",
    "it'll",
    "He'D",
    "can't",
    "DON'T",
    "l'eau",
    "'tis",
    "rock'n'roll",
    "’s",
    "''s",
)
_NUMBERS = (
    "0",
    "7",
    "42",
    "123",
    "1234",
    "12345",
    "3.14",
    "1,000,000",
    "2026-05-17",
    "0x1F",
    "1e-5",
    "12:30",
    "²³",
)
_SPACES = (
    *(" ", "  ", "   ", "        ", "\t", "\t\t", " \t ", "\n", "\n\n", "\n\n\n", "\r\n", " \n", "\n "),
    *("\u00a0", "\u2003", "\u3000"),
)
_SIGNS = (
    *(
        ".",
        ",",
        "...",
        "!",
        "?!",
        "--",
        "—",
        "//",
        "/*",
        "*/",
        "==",
        "!=",
        "->",
        "=>",
        "&&",
        "||",
        "{",
        "}",
        "()",
    ),
    *(
        "[]",
        "<",
        ">",
        "#",
        "##",
        "@",
        "$",
        "€",
        "%",
        "^",
        "~",
        "`",
        "```",
        "\\",
        '"',
        "'",
        "''",
        "“",
        "”",
        "…",
        "。",
    ),
    *("、", "！", "_", "__", "+", "=", "|", ":", "::", ";", "/"),
)
_CODE = (
    "def area(w, h):\n    return w*h\n",
    "for(int i=0;i<10;++i){\n\tx+=i;\n}",
    "SELECT * FROM t WHERE a='b';",
    '<div class="x">\n  y\n</div>',
    "https://example.org/a?b=c&d=1",
    "C:\\temp\\new.txt",
    "if x != None:  # why\n\t\tpass",
    "$HOME/.config\n\n\n",
    '{"a": [1, 2.5, null]}',
    "a=b+c*d-e/f%g",
)
_RANGES = (
    *((0x20, 0x3100), (0x4E00, 0x4E40), (0xA4D0, 0xA840), (0xFF00, 0xFFF0)),
    *((0x1D400, 0x1D440), (0x1F600, 0x1F640)),
)
"""Of code points, whose classes are tried."""


@cache
def probes() -> tuple[str, ...]:
    """Each part alone, each character class, and then parts strung together with and without spaces."""
    draw = random.Random(_SEED)
    parts = (*_WORDS, *_CONTRACTIONS, *_NUMBERS, *_SPACES, *_SIGNS, *_CODE)
    classes = _classes()
    found = [*parts, *(f"{one}{two}" for one in _SPACES for two in ("a", "1", ".", "\n", "é"))]
    found += [
        f"{before}{''.join(chars[:4])}{after}"
        for chars in classes
        for before in ("", " ", "a")
        for after in ("", "1", "b")
    ]
    kinds = (_WORDS, _CONTRACTIONS, _NUMBERS, _SPACES, _SIGNS, _CODE)
    while len(found) < COUNT:
        text = ""
        for _ in range(draw.randint(1, 7)):
            if draw.random() < 0.15:
                text += draw.choice(draw.choice(classes))
            else:
                text += draw.choice(kinds[draw.choices(range(6), (6, 2, 3, 5, 4, 1))[0]])
            if draw.random() < 0.4:
                text += " "
        found.append(text)
    return tuple(found[:COUNT])


def _classes() -> list[list[str]]:
    """Some characters of each general category of Unicode, of the basic plane and the one after it."""
    by_category: dict[str, list[str]] = {}
    for first, last in _RANGES:
        for code in range(first, last):
            category = unicodedata.category(chr(code))
            if category not in ("Cs", "Cn", "Co"):
                by_category.setdefault(category, []).append(chr(code))
    draw = random.Random(_SEED)
    return [draw.sample(chars, min(24, len(chars))) for _, chars in sorted(by_category.items())]
