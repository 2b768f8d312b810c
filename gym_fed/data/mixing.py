"""Weighted interleaving of streams: which source the next row is from is drawn by the seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

T = TypeVar("T")
Stopping = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]
STOPPING = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")


def interleave(
    sources: Sequence[Callable[[], Iterator[T]]],
    weights: Sequence[float],
    seed: int,
    stopping: Stopping = "first_exhausted",
    on_stop: Callable[[int], None] | None = None,
) -> Iterator[T]:
    """Rows of all sources; the next is from source i with probability ``weights[i] / sum(weights)``.

    Args:
        sources: Each starts a source from its first row.
        weights: Positive, one a source.
        seed: The same seed gives the same order.
        stopping: As ``datasets.interleave_datasets`` names the rules. ``first_exhausted``: at the first source that has
            no more, so that the shares hold to the end. ``all_exhausted``: a source that ends begins again until every
            one has ended, so that rows repeat. ``all_exhausted_without_replacement``: a source that ends drops out, so
            that every row comes once.
        on_stop: Called under ``first_exhausted`` with the source that ended it, where there are others.
    """
    rng = random.Random(seed)
    streams = [start() for start in sources]
    open_ones = list(range(len(streams)))
    ended: set[int] = set()
    while open_ones:
        if len(open_ones) == 1:
            index = open_ones[0]
        else:
            (index,) = rng.choices(open_ones, [weights[i] for i in open_ones])
        try:
            row = next(streams[index])
        except StopIteration:
            ended.add(index)
            if stopping == "first_exhausted" or len(ended) == len(streams):
                if len(ended) < len(streams) and on_stop is not None:
                    on_stop(index)
                return
            if stopping == "all_exhausted_without_replacement":
                open_ones.remove(index)
                continue
            streams[index] = sources[index]()
            row_or_none = next(streams[index], None)
            if row_or_none is None:  # it holds nothing at all
                open_ones.remove(index)
                continue
            row = row_or_none
        yield row
