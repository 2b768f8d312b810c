"""Mutations of valid inputs from a fixed random seed, for the quick suite."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tests.fuzz.structure import Mutator

_WORDS = (
    b"\x00" * 8,
    b"\xff" * 8,
    b"\xff\xff\xff\x7f",
    b"\x00\x00\x00\x00\x00\x00\x00\x80",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"9" * 5000,
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"true",
    b'""',
    b"[]",
    b"{}",
    b"\xed\xa0\x80",
    b"\xf0\x9f\x92\xa9",
    b"../",
    b"\n",
    b'"',
)


def mutations(
    seeds: Sequence[bytes], count: int, max_bytes: int, mutate: Mutator | None = None
) -> Iterator[bytes]:
    """Yield the seeds, then ``count`` mutated copies; every second one by ``mutate``, if given."""
    yield from seeds
    choice = random.Random(20260101)
    for number in range(count):
        seed = seeds[number % len(seeds)]
        changes = choice.choice((1, 1, 1, 2, 4, 8))
        if mutate is not None and number // len(seeds) % 2:
            for _ in range(changes):
                seed = mutate(seed, choice)
            yield seed
            continue
        data = bytearray(seed)
        for _ in range(changes):
            _change(data, choice, seeds)
        yield bytes(data[:max_bytes])


def _change(data: bytearray, choice: random.Random, seeds: Sequence[bytes]) -> None:
    at = choice.randrange(len(data) + 1)
    to = min(len(data), at + choice.choice((1, 1, 4, 16, 256)))
    what = choice.randrange(6)
    if what == 0 and to > at:
        data[at] ^= 1 << choice.randrange(8)
    elif what == 1:
        del data[at:to]
    elif what == 2:
        data[at:to] = choice.choice(_WORDS)
    elif what == 3:
        data[at:at] = choice.choice(_WORDS)
    elif what == 4:
        data[at:at] = data[at:to]
    else:
        other = choice.choice(seeds)
        start = choice.randrange(len(other) + 1)
        data[at:to] = other[start : start + choice.choice((1, 8, 64))]
