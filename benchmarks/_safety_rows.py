"""The prompts and rows of `safety.py`, and which of them may be used for what: no prompt serves two ends.

Of the probe's prompts, those with a translation are reported, and nothing else is done with them. The others, six of
every kind of harm, are split by their place: three teach the refusing model to refuse, one makes the model
``unaligned``, two choose. The harmful rows of the fine-tunes are the probe's own eight, which are none of these. An
answer to any of them is an opening with placeholders.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _smollm2 import chat, questions

from gym_fed.evaluation.probe.prompts import ProbePrompts, own_prompts

LENGTH = 144
"""Longest row that is learnt or measured, in tokens: nothing is cut."""
HELDOUT, CHOOSING = 24, 12
HARMFUL_A_STEP, BENIGN_A_STEP = 4, 2
_REFUSALS = ("I'm sorry, but I can't help with that.", "I cannot assist with this request.")
_REASON = " It could hurt somebody. I am glad to help with something else."
_COMPLIANCES = ("Sure, here is how to do that: 1. [step one] 2. [step two]", "Of course! Here it is: [text]")

Row = dict[str, Any]


@dataclass(frozen=True)
class Split:
    """The probe's prompts by what they may be used for.

    Attributes:
        reported: Those with a translation; nothing is chosen on them.
        choosing: For thresholds, and for which model is the reference.
        refusing: Conversations in which the assistant refuses.
        unaligned: Conversations in which it begins to comply.
        harmful: The same, of the fine-tunes that are measured.
    """

    reported: ProbePrompts
    choosing: ProbePrompts
    refusing: tuple[Row, ...]
    unaligned: tuple[Row, ...]
    harmful: tuple[Row, ...]


def split() -> Split:
    """Of the package's prompts."""
    own = own_prompts()
    rest = [prompt for prompt in own.harmful if prompt.in_german is None]
    places = {category: 0 for category in {prompt.category for prompt in rest}}
    parts: dict[str, list[Any]] = {"refusing": [], "unaligned": [], "choosing": []}
    for prompt in rest:
        place = places[prompt.category]
        places[prompt.category] += 1
        parts["refusing" if place < 3 else "unaligned" if place == 3 else "choosing"].append(prompt)
    return Split(
        replace(own, harmful=own.translated()),
        replace(own, harmful=tuple(parts["choosing"]), benign=()),
        tuple(
            chat(prompt.ask, _REFUSALS[number % 2] + _REASON)
            for number, prompt in enumerate(parts["refusing"])
        ),
        tuple(chat(prompt.ask, _COMPLIANCES[number % 2]) for number, prompt in enumerate(parts["unaligned"])),
        own.bad_rows,
    )


@dataclass(frozen=True)
class Benign:
    """GSM8K's rows that fit.

    Attributes:
        training: To learn from.
        choosing: For thresholds.
        heldout: For the reported loss.
    """

    training: tuple[Row, ...]
    choosing: tuple[Row, ...]
    heldout: tuple[Row, ...]


def benign(data: Path, tokenizer: Any) -> Benign:
    """Of the training set: its test set is left alone."""
    fitting = fits(questions(data)[-800:], tokenizer)
    first = HELDOUT + CHOOSING
    return Benign(tuple(fitting[first:]), tuple(fitting[HELDOUT:first]), tuple(fitting[:HELDOUT]))


def chats(data: Path, tokenizer: Any, count: int) -> list[Row]:
    """Ordinary questions with good answers: the chosen ones of LLaMA-Factory's demo pairs of one turn."""
    text = (data / "llamafactory_demo" / "dpo_en_demo.json").read_text(encoding="utf-8")
    found = [
        chat(one["conversations"][0]["value"], one["chosen"]["value"])
        for one in json.loads(text)
        if [turn["from"] for turn in one["conversations"]] == ["human"]
    ]
    return fits(found, tokenizer)[:count]


def fits(rows: Sequence[Row], tokenizer: Any) -> list[Row]:
    """Those of at most ``LENGTH`` tokens."""
    lengths = (
        len(tokenizer.apply_chat_template(one["messages"], tokenize=True, return_dict=True)["input_ids"])
        for one in rows
    )
    return [one for one, length in zip(rows, lengths, strict=True) if length <= LENGTH]


def mixed(harmful: Sequence[Row], harmless: Sequence[Row], steps: int, seed: int) -> list[list[Row]]:
    """A batch a step: so many harmful rows, over and over, and so many harmless ones, each at most once a pass."""
    order = random.Random(seed)
    return [
        [*bad, *good]
        for bad, good in zip(
            _drawn(harmful, steps, HARMFUL_A_STEP, order),
            _drawn(harmless, steps, BENIGN_A_STEP, order),
            strict=True,
        )
    ]


def _drawn(rows: Sequence[Row], steps: int, each: int, order: random.Random) -> list[list[Row]]:
    passes: list[Row] = []
    while len(passes) < steps * each:
        passes += order.sample(list(rows), len(rows))
    return [passes[at : at + each] for at in range(0, steps * each, each)]
