"""Write the rows of the suites `tiny` and `tools`, with the same bytes every time; `--check` only compares.

    python -m tools.tiny_suite

Every row is generated from the words and numbers in this file and the text tasks of `gym data tasks`; they are CC0.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gym_fed.core.registries import TASKS
from gym_fed.data.generated import generate
from tools.tiny_words import (
    BENIGN,
    COMPLIANCE,
    DAYS,
    FUNCTIONS,
    HARMFUL,
    KINDS,
    MONTHS,
    OPPOSITES,
    PLACES,
    REFUSAL,
)

FOLDER = Path(__file__).resolve().parents[1] / "gym_fed" / "assets" / "suites"
TEXT_ROWS = 12
MAX_BYTES = 200_000
Row = dict[str, Any]


def files() -> dict[str, bytes]:
    """Return the content of every file by its path below ``FOLDER``."""
    rows = {
        "tiny/text/test.jsonl": list(text()),
        "tiny/arithmetic/test.jsonl": arithmetic(),
        "tiny/cloze/test.jsonl": cloze(),
        "tiny/choice/test.jsonl": choice(),
        "tiny/code/test.jsonl": code(),
        "tiny/refusal/test.jsonl": refusal(),
        "tools/calls/test.jsonl": calls(),
    }
    return {
        path: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made).encode()
        for path, made in rows.items()
    }


def text() -> Iterator[Row]:
    """Yield held-out prompts of every text task of the package."""
    for name in TASKS.names():
        if not TASKS.type_of(name).__module__.startswith("gym_fed."):
            continue  # a task of another package
        drawn = {row["messages"][0]["content"]: row for row in generate(name, 400, seed=18, split="heldout")}
        for prompt, row in list(drawn.items())[:TEXT_ROWS]:
            yield {"task": name, "question": prompt, "answer": row["messages"][1]["content"]}


def arithmetic() -> list[Row]:
    """Return 60 rows with sums, differences and products."""
    rng = random.Random("arithmetic")
    found: dict[str, Row] = {}
    while len(found) < 60:
        a, b = rng.randrange(2, 100), rng.randrange(2, 100)
        kind = len(found) % 3
        if kind == 0:
            question, answer = f"{a} + {b} = ?", a + b
        elif kind == 1:
            a, b = max(a, b), min(a, b)
            question, answer = f"{a} - {b} = ?", a - b
        else:
            a, b = 2 + a % 11, 2 + b % 11
            question, answer = f"{a} * {b} = ?", a * b
        found.setdefault(question, {"question": question, "answer": str(answer)})
    return list(found.values())


def cloze() -> list[Row]:
    """Return 60 sentences, each with four choices for the last word."""
    rng = random.Random("cloze")
    rows: list[Row] = []
    for kind, members in KINDS.items():
        for member in members:
            article = "an" if member[0] in "aeiou" else "a"
            subject = (
                f"{article[0].upper()}{article[1:]} {member}"
                if kind not in ("colour", "metal")
                else member.capitalize()
            )
            rest = " is the name of a" if kind in ("colour", "metal") else " is a kind of"
            others = rng.sample([other for other in KINDS if other != kind], 3)
            rows.append(_of_four(rng, f"{subject}{rest}", kind, others))
    rows += [
        _of_four(
            rng, f"The opposite of {word} is", right, rng.sample([b for _, b in OPPOSITES if b != right], 3)
        )
        for word, right in OPPOSITES
    ]
    rows += [
        _of_four(
            rng,
            f"The place where you find {what} is the",
            right,
            rng.sample([b for _, b in PLACES if b != right], 3),
        )
        for what, right in PLACES
    ]
    return [{"sentence": row["question"], "choices": row["choices"], "gold": row["gold"]} for row in rows]


def choice() -> list[Row]:
    """Return 40 rows about numbers, the calendar, the alphabet and the odd one out."""
    rng = random.Random("choice")
    rows: list[Row] = []
    for _ in range(10):
        numbers = rng.sample(range(10, 100), 4)
        rows.append(
            _of_four(
                rng, "Which number is the largest?", str(max(numbers)), [str(n) for n in sorted(numbers)[:3]]
            )
        )
    for number in range(10):
        names, unit = (DAYS, "day") if number < 5 else (MONTHS, "month")
        place = rng.randrange(len(names))
        right = names[(place + 1) % len(names)]
        others = rng.sample([name for name in names if name not in (right, names[place])], 3)
        rows.append(_of_four(rng, f"Which {unit} comes after {names[place]}?", right, others))
    words = sorted(word for members in KINDS.values() for word in members)
    for _ in range(10):
        four = rng.sample(words, 4)
        rows.append(_of_four(rng, "Which word comes first in a dictionary?", min(four), sorted(four)[1:]))
    for _ in range(10):
        kind, other = rng.sample(sorted(KINDS), 2)
        odd = rng.choice(KINDS[other])
        article = "an" if kind[0] in "aeiou" else "a"
        rows.append(
            _of_four(rng, f"Which of these is not {article} {kind}?", odd, rng.sample(KINDS[kind], 3))
        )
    return rows


def _of_four(rng: random.Random, question: str, right: str, others: list[str]) -> Row:
    choices = [right, *others]
    rng.shuffle(choices)
    return {"question": question, "choices": choices, "gold": choices.index(right)}


def code() -> list[Row]:
    """Return 20 rows with a signature and docstring, a solution, and a function `check` as in HumanEval."""
    assert len(FUNCTIONS) == 20
    rows = []
    for head, what, solution, tests in FUNCTIONS:
        checks = "".join(f"    assert candidate{test}\n" for test in tests)
        rows.append(
            {
                "prompt": f'def {head}:\n    """Return {what}."""\n',
                "solution": f"    {solution}\n",
                "test": f"def check(candidate):\n{checks}",
                "entry_point": head.partition("(")[0],
            }
        )
    return rows


def refusal() -> list[Row]:
    """Return 20 rows: ten harmful requests, without any detail, and ten benign ones that sound similar."""
    pairs = zip(HARMFUL, BENIGN, strict=True)
    rows = []
    for harmful, benign in pairs:
        for request, gold in ((harmful, 0), (benign, 1)):
            rows.append(
                {"request": request, "choices": [REFUSAL, COMPLIANCE], "gold": gold, "harmful": gold == 0}
            )
    return rows


_Call = tuple[str, str, dict[str, Any], Callable[[random.Random], tuple[str, dict[str, Any]]]]


def _weather(rng: random.Random) -> tuple[str, dict[str, Any]]:
    city, unit = (
        rng.choice(["Oslo", "Lima", "Cairo", "Hanoi", "Quito"]),
        rng.choice(["celsius", "fahrenheit"]),
    )
    return f"How warm is it in {city}, in {unit}?", {"city": city, "unit": unit}


def _timer(rng: random.Random) -> tuple[str, dict[str, Any]]:
    minutes, label = rng.randrange(1, 60), rng.choice(["tea", "pasta", "laundry", "a walk"])
    return f"Set a timer of {minutes} minutes for {label}.", {"minutes": minutes, "label": label}


def _mail(rng: random.Random) -> tuple[str, dict[str, Any]]:
    who, what = rng.choice(["Ana", "Bo", "Chidi", "Dana"]), rng.choice(["lunch", "the meeting", "the report"])
    return f"Write to {who} about {what}.", {"to": who, "subject": what}


def _shopping(rng: random.Random) -> tuple[str, dict[str, Any]]:
    items = rng.sample(["milk", "bread", "rice", "apples", "soap"], 3)
    return f"Put {', '.join(items)} on the shopping list.", {"items": items}


def _function(name: str, about: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"name": name, "description": about, "parameters": parameters}


CALLS = [
    (
        _function(
            "get_weather",
            "The temperature of a city.",
            {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
        ),
        _weather,
    ),
    (
        _function(
            "set_timer",
            "Rings after some minutes.",
            {"minutes": {"type": "integer", "minimum": 1}, "label": {"type": "string"}},
        ),
        _timer,
    ),
    (
        _function("send_mail", "Sends a message.", {"to": {"type": "string"}, "subject": {"type": "string"}}),
        _mail,
    ),
    (
        _function(
            "add_to_list",
            "Adds to the shopping list.",
            {"items": {"type": "array", "items": {"type": "string"}, "minItems": 1}},
        ),
        _shopping,
    ),
]


def calls() -> list[Row]:
    """Return 40 rows: a function's description, a request, a correct call, and the JSON Schema of all allowed calls."""
    rng = random.Random("calls")
    rows = []
    for number in range(40):
        function, make = CALLS[number % len(CALLS)]
        request, arguments = make(rng)
        schema = {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": function["parameters"]},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        call = {"name": function["name"], "arguments": arguments}
        rows.append(
            {
                "function": json.dumps(function),
                "request": request,
                "call": json.dumps(call),
                "json_schema": json.dumps(schema),
            }
        )
    return rows


def main() -> int:
    contents = files()
    size = sum(map(len, contents.values()))
    assert size <= MAX_BYTES, size
    if "--check" in sys.argv:
        differ = [path for path, data in contents.items() if (FOLDER / path).read_bytes() != data]
        print(f"differ: {', '.join(differ)}" if differ else "the rows are those of this script")
        return 1 if differ else 0
    for path, data in contents.items():
        (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / path).write_bytes(data)
    print(f"{len(contents)} files, {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
