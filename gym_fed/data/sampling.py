"""Samples of streams: a fixed number of rows, each as likely as any other, without holding the rest."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def reservoir(items: Iterable[T], count: int, seed: int) -> Iterator[T]:
    """``count`` of the items in their order, drawn by the seed (Vitter 1985, algorithm R).

    When there are fewer items, all of them come, again from the first one on until ``count`` is reached.
    """
    rng = random.Random(seed)
    kept: list[tuple[int, T]] = []
    for index, item in enumerate(items):
        if index < count:
            kept.append((index, item))
        elif (place := rng.randrange(index + 1)) < count:
            kept[place] = (index, item)
    kept.sort(key=lambda pair: pair[0])
    for turn in range(count if kept else 0):
        yield kept[turn % len(kept)][1]
