"""Ten thousand short texts on which two tokenizers are compared, the same on every machine."""

from __future__ import annotations

import random
from functools import cache

COUNT = 10_000
_SEED = 20240517
_WORDS = (
    "the Water harbour CamelCase snake_case iPhone naïve Straße Ελλάδα привет МОСКВА שלום مرحبا नमस्ते "
    "สวัสดี 한국어 こんにちは カタカナ 漢字 工作 café résumé ﬁne Ǆ ªº x² H₂O ½ Ⅷ ٣٤ e\u0301 "
    "👍 👩\u200d👩\u200d👧 🏳️\u200d🌈"
)
_CONTRACTIONS = "I'm you're WE'VE it'll He'D can't DON'T l'eau 'tis rock'n'roll ’s ''s"
_NUMBERS = "0 7 42 123 1234 12345 3.14 1,000,000 2026-05-17 0x1F 1e-5 12:30 ²³"
_SPACES = (
    *(" ", "  ", "   ", "        ", "\t", "\t\t", " \t ", "\n", "\n\n", "\n\n\n", "\r\n", " \n", "\n "),
    *("\u00a0", "\u2003", "\u3000"),
)
_SIGNS = (
    ". , ... ! ?! -- — // /* */ == != -> => && || { } () [] < > # ## @ $ € % ^ ~ ` ``` \\ \" ' '' “ ” … 。 "
    "、 ！ _ __ + = | : :: ; /"
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
_CLASSES = (
    (  # Cc
        "\x89\x84\x82\x81\x9d\x88\x91\x8c\x94\x85\x8e\x9b\x9a\x9e\x96\x98\x86\x8f\x8a\x7f\x99\x87\x80\x9c"
    ),
    (  # Cf
        "\u202c\u206e\u202b\u0605\u2063\u2069\u0600\u206b\u0891\u200f\u200d\u206f"
        "\u206a\u200b\u061c\u2060\u070f\u200e\u2062\u2067\xad\u202e\u202d\u0603"
    ),
    (  # Ll
        "\u1d28\u1eab\u2d18\xe0\ua735\u10d2\u026c\u0436\u2134\u10df\u044b\u0146"
        "\u1f12\u044e\u1f7c\u1d1c\u1e8b\u1f41\u1ea1\u1ff3\ua76f\u2cbb\u0298\U0001d433"
    ),
    (  # Lm
        "\u1d4d\u1dbd\u2095\u1da9\u1d5c\u1d40\ua71a\u0640\u02e2\u2c7c\u0971\u2096"
        "\u1d5e\ua7f9\u1d3a\u1d43\ua71c\u1d54\u3031\u1dbf\u0e46\ua7f8\u1da6\u1d4e"
    ),
    (  # Lo
        "\u30e1\u1995\u151b\u06ee\ua5dc\u07a1\u0d96\u0e30\u186b\u1187\u1913\u0a9c"
        "\u0db3\u0635\ua606\ua61e\u167c\u075e\u16e9\u0c0b\u12fc\u0c18\u12e9\ua6b6"
    ),
    (  # Lt
        "\u1f8f\u1f9d\u01cb\u1f8c\u1f88\u01c5\u1fa9\u1f9c\u1ffc\u1fbc\u1fae\u1faa"
        "\u1f9b\u1f98\u1faf\u1fad\u1fab\u01f2\u1f9a\u1fac\u1f8e\u01c8\u1fa8\u1f89"
    ),
    (  # Lu
        "\U0001d434\u1e86\xc2\u0388\ua7d0\u0556\u1ecc\u01d3\u2102\u039f\u1f6e\ua7aa"
        "\u01d7\u0518\u047a\u0528\u01d1A\ua7c6\u13ed\u1ed2\uff24\u023e\u1cb3"
    ),
    (  # Mc
        "\u0bcb\u0d4c\u1c24\u1c2a\u0cc7\u09cb\u1b40\u1be7\u108a\u192a\u1b3d\u0a03"
        "\u17c3\u0903\u0bbf\u0a83\u094b\u0949\u1087\u0df2\ua823\u17c5\u094f\u0c42"
    ),
    (  # Me
        "\ua672\u0489\u1abe\u20e0\ua670\u20de\u20dd\u20e3\u0488\u20df\ua671\u20e2\u20e4"
    ),
    (  # Mn
        "\u1dea\u0eb6\u06e3\u0f83\u0f87\u0598\u0c46\u0361\u1b6e\u0749\u0ae3\u1c2d"
        "\u20d1\u1be8\u0eb8\u0595\u05b8\u036f\u036a\u081d\u1cd5\u1752\u0338\u08cd"
    ),
    (  # Nd
        "\u1c42\u17e2\u19d6\u0ed1\u0968\u1094\u1a90\u194d\u0b6f\u1093\u0aed\u09ea"
        "\u194a\u0c6d\u0d66\u1bb3\u0f27\u0bec\u1041\u0ed2\ua626\u17e6\u0a6f\u096e"
    ),
    (  # Nl
        "\u16ef\u217c\ua6e6\u2169\u3022\u216d\ua6ec\u2180\u2177\u217a\u2167\ua6e8"
        "\u2181\ua6e9\u2161\u3039\u2166\u2171\u217b\u2163\u216f\ua6ef\u3027\ua6eb"
    ),
    (  # No
        "\u246b\u0c7b\u2471\u24f9\u24ee\u0f2e\u17f0\u2470\u2189\u09f9\u277c\u278c"
        "\u248e\u17f1\u2777\u1377\u17f6\u1371\u1370\u24f0\ua832\u24f7\u2151\u2463"
    ),
    "\uff3f_\u2054\u2040\u203f",  # Pc
    (  # Pd
        "\u30a0\u2e5d\u2e17\u2014\u2012\u2010\u3030\u301c\u2015\u1806\uff0d\u2011"
        "\u05be\u1400\u2e3a\u2e3b\u2e40\u2e1a-\u058a\u2013"
    ),
    (  # Pe
        "\u2e58\u2309\u301f\u169c\u2992\u2e25\u2998\u27e9)\u2990\u2771\u0f3b"
        "\u0f3d\uff63}\u301b\u2e27\uff09\u207e\uff60\u2773\u298a\u27c6\u276b"
    ),
    "\u2e21\u2e1d\u2e0d\u201d\u2e03\u2019\u203a\u2e0a\xbb\u2e05",  # Pf
    "\u2039\u201f\u2e20\u2018\u2e02\u201c\u2e09\u2e0c\xab\u201b\u2e04\u2e1c",  # Pi
    (  # Po
        "\u2e52\u0834\u2e45/\u1804\u2038\u104c\u0965\u2e47\u2026\u2e4b\u1809"
        "\u204e\u2cf9\u203d\u2e19\u1cc5\u066d\u2e48\u05c0\u2020\u2e46\u2042\u05c3"
    ),
    (  # Ps
        "\u2985\u207d\u3010\u276e\u2e26\u298f\u2045\u2772\u27c5\uff5b\u276a\u27ea"
        "\u2987(\uff62\u2983\u2995\u2e57\u300c\u2e42\u2991\u2329\u298b\u0f3c"
    ),
    (  # Sc
        "\u20b2\u20a2\u20be\u20b5\u20b4\u060b\u20aa\u0af1\uffe6\u20a4\uffe1\u20ae"
        "\u20b0\u20ac\xa2\u20ba\u0bf9\u20bb$\u20b7\u058f\u20b8\u20a3\xa4"
    ),
    (  # Sk
        "\u309c\ua705\u02f1\ua709\ua712\uff40\ua713^\u02fa\ua700\u02c4\ua702"
        "\uff3e\u02dc\ua70d\u02f6\u02c3\u02f2\ua716\ua707\ua703\u1fcd\u02fc\u1fce"
    ),
    (  # Sm
        "\u2218\u2289\u2908\u25c1\u2201\u2a7a\u2a8a\u22ed\u2191\u21f8\u2261\u2a3f"
        "\u221d\u2970\u296d\u29ac\u22c1\u22fa\u2978\u2a14\uffea\u293f\u2913\u2a3e"
    ),
    (  # So
        "\u230c\u2eda\u2609\u279c\u26ef\u2bc6\u2406\u26e2\u2b8a\u289c\u280d\u0fcf"
        "\u2fd5\u2408\u2ef0\u2bf4\u2574\u2816\u250a\u2b10\u2319\u2444\u28b2\u2695"
    ),
    "\u2028",  # Zl
    "\u2029",  # Zp
    (  # Zs
        "\u2006\u205f\u2005\u2001\u2009\xa0\u3000\u202f\u2007\u2002\u200a\u2004 \u2008\u2000\u2003\u1680"
    ),
)
"""Up to 24 characters of each general category, drawn once with Unicode 14, since Python versions' tables differ."""


@cache
def probes() -> tuple[str, ...]:
    """Return each part alone, white space and character classes in context, and then random sequences of parts."""
    draw = random.Random(_SEED)
    words, contractions, numbers, signs = (text.split() for text in (_WORDS, _CONTRACTIONS, _NUMBERS, _SIGNS))
    kinds = (words, contractions, numbers, _SPACES, signs, _CODE)
    parts = [part for kind in kinds for part in kind]
    texts = [*parts, *(f"{space}{two}" for space in _SPACES for two in ("a", "1", ".", "\n", "é"))]
    texts += [
        f"{before}{chars[:4]}{after}"
        for chars in _CLASSES
        for before in ("", " ", "a")
        for after in ("", "1", "b")
    ]
    while len(texts) < COUNT:
        text = ""
        for _ in range(draw.randint(1, 7)):
            if draw.random() < 0.15:
                text += draw.choice(draw.choice(_CLASSES))
            else:
                text += draw.choice(kinds[draw.choices(range(6), (6, 2, 3, 5, 4, 1))[0]])
            if draw.random() < 0.4:
                text += " "
        texts.append(text)
    return tuple(texts[:COUNT])
