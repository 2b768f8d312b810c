"""The length evidence of a hub's clean rows (``gym_server.rounds.evidence``), for federations without a hub."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.aggregators.byzantine_evidence import LENGTHS
from gym_fed.soup.gram import RowEvidence
from gym_fed.soup.merging import claims


def row_evidence(
    updates: list[DeltaFile],
    recipe: SoupRecipe,
    spec: BaseSpec,
    root: DeltaFile,
    loss: Callable[[list[float]], float],
) -> RowEvidence:
    """Determine which long updates keep their length, and the length of the soup.

    Args:
        updates: Open deltas of ``spec``.
        recipe: The merge rules.
        spec: The base of the updates.
        root: The coordinator's own update.
        loss: Function that returns the loss on the clean rows with the updates added, each scaled by its coefficient.
    """
    base, claimed = claims(updates, [1.0] * len(updates), recipe, spec, root)

    def added(kept: list[bool]) -> list[float]:
        return [b + c * k for b, c, k in zip(base, claimed, kept, strict=True)]

    useful, each = [False] * len(updates), range(len(updates))
    if any(claimed):
        before = loss(base)
        useful = [claimed[i] > 0.0 and loss(added([j == i for j in each])) < before for i in each]
        if sum(useful) > 1 and not loss(added(useful)) < before:
            useful = [False] * len(updates)
    losses = {length: loss([length * c for c in added(useful)]) for length in LENGTHS}
    best = min(LENGTHS, key=losses.__getitem__)
    print(f"long updates kept: {sum(useful)}; length of the soup: {best}", file=sys.stderr, flush=True)
    return RowEvidence(useful, best)
