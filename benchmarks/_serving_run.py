"""What a part of ``serving.py`` measured: its sides by name, their speeds, the tables and the picture of them."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from _peer import spread
from _report import Better, Report, load, machine
from _report import key as figure_key
from _report import show as show_table
from _serving_models import Base
from _serving_sides import Load, Side, Speeds, in_turns

USERS = (1, 8, 32)
BASE, EXACT, LOOKUP = "the base alone", "one-bit variants, exact", "one-bit variants, look-up"
LORA, PEFT, SWAP = "LoRA variants", "PEFT adapter_names", "swapping merged models"

Found = dict[str, dict[int, Speeds]]


@dataclass
class Run:
    """One part: its settings, its report, and what was measured."""

    part: str
    quick: bool
    users: tuple[int, ...]
    turns: int
    folder: Path
    report: Report
    found: Found = field(default_factory=dict)

    def load(self, users: int, base: Base, prompt: int = 64, new: int = 32) -> Load:
        """64 + 32 tokens, fewer when in a hurry."""
        vocabulary = base.model.config.vocab_size
        return Load(users, 16, 8, vocabulary) if self.quick else Load(users, prompt, new, vocabulary)

    def take(self, sides: dict[str, Side], load: Load, turns: int | None = None) -> None:
        """Measure the sides in turns."""
        for name, speeds in in_turns(sides, load, turns or self.turns, say).items():
            self.found.setdefault(name, {})[load.users] = speeds


def ratios(found: Found, ours: str, theirs: str, users: int) -> list[float]:
    """Our tokens per second over theirs, turn by turn."""
    sides = found[ours][users].tokens_a_second, found[theirs][users].tokens_a_second
    return [a / b for a, b in zip(*sides, strict=True)]


def shares(run: Run, pairs: dict[str, tuple[str, ...]]) -> None:
    """Rows of our rates next to others', and the spread of their ratios."""
    better: Better = "higher"
    for ours, others in pairs.items():
        for theirs in others:
            for users in run.found[ours]:
                if users not in run.found[theirs]:
                    continue
                rates = run.found[ours][users].rate, run.found[theirs][users].rate
                what = f"{run.part}: {users} users, {ours} against {theirs}"
                run.report.compare(what, *rates, unit="tokens/s", better=better)
                seen = ratios(run.found, ours, theirs, users)
                for name, value in (
                    ("least", min(seen)),
                    ("median", statistics.median(seen)),
                    ("most", max(seen)),
                ):
                    run.report.figure(figure_key(f"{what} {name} ratio"), value)


def show(run: Run) -> None:
    """The tables of a part, and every number of them as a figure."""
    tables: tuple[tuple[str, Callable[[Speeds], str]], ...] = (
        (
            f"{run.part}: tokens per second of all users, median (least-most)",
            lambda speeds: spread(speeds.tokens_a_second),
        ),
        (f"{run.part}: seconds to the first token, 50 / 99 of 100", first_text),
        (f"{run.part}: what ran, counted", ran_text),
    )
    for title, cell in tables:
        rows = [
            [name, *(cell(by_users[u]) if u in by_users else "-" for u in run.users)]
            for name, by_users in run.found.items()
        ]
        show_table(title, ("", *(f"{users} users" for users in run.users)), rows)
    say(f"{torch.get_num_threads()} threads; {machine()['vectors']}; {load()}")
    for name, by_users in run.found.items():
        for users, speeds in by_users.items():
            key = figure_key(f"{run.part} {users} users {name}")
            run.report.figure(f"{key}_tokens_s", speeds.rate)
            run.report.figure(f"{key}_least_tokens_s", min(speeds.tokens_a_second))
            run.report.figure(f"{key}_most_tokens_s", max(speeds.tokens_a_second))
            run.report.figure(f"{key}_first_token_p50_s", speeds.first(0.5))
            run.report.figure(f"{key}_first_token_p99_s", speeds.first(0.99))
            for kind, count in speeds.ran.items():
                run.report.figure(f"{key}_ran_{kind.replace(' ', '_')}", count)


def first_text(speeds: Speeds) -> str:
    """Two percentiles, and of how many."""
    return f"{speeds.first(0.5):.3g} / {speeds.first(0.99):.3g} of {len(speeds.first_token_seconds)}"


def ran_text(speeds: Speeds) -> str:
    """Counts that are not zero."""
    return ", ".join(f"{kind} {count}" for kind, count in speeds.ran.items() if count) or "-"


def say(text: str) -> None:
    """How far it is."""
    print(text, file=sys.stderr, flush=True)
