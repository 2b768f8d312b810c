"""Take a model from one version to a later one, the same on every path: soups that add up are added as one sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from gym_fed.config.hub.task import SoupReference
from gym_fed.delta.base import BaseSpec, Tensors
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.delta.integer_sum import IntegerSum, read_sum


def is_within_sum(soups: Sequence[SoupReference], at: int) -> bool:
    """Return True if the soups before and after the version at this index add up, so that no sum starts there."""
    return 0 < at < len(soups) and None not in (soups[at - 1].integers, soups[at].integers)


def specs_of(base: BaseSpec, soups: Sequence[SoupReference]) -> list[BaseSpec]:
    """Return the spec of the base, and of the version after each soup."""
    digests = [base.digest, *(soup.version_digest for soup in soups)]
    return [BaseSpec(base.model_name, digest, base.shapes) for digest in digests]


def apply_soups(
    model: Tensors,
    soups: Sequence[SoupReference],
    start: BaseSpec,
    path_of: Callable[[str], Path],
    last_sum: IntegerSum | None = None,
) -> None:
    """Apply soups to the tensors of a version in place.

    Args:
        model: Tensors of the version ``start``, which must not be ``is_within_sum``.
        soups: Soups from that version on.
        start: Spec of the version.
        path_of: Returns the file of a soup by its sha256.
        last_sum: Sum of the last soups if they add up; by default it is read from the soups.

    Raises:
        GymError: ``DELTA_INVALID`` or ``BASE_MISMATCH``. The tensors may then be at a version in between.
    """
    specs, at = specs_of(start, soups), 0
    for adds_up, run in groupby(soups, lambda soup: soup.integers is not None):
        first, at = at, at + len(list(run))
        if adds_up and last_sum is not None and at == len(soups):
            last_sum.apply(model)
            continue
        files = [(path_of(soups[i].sha256), specs[i]) for i in range(first, at)]
        if adds_up:
            read_sum(files, str(soups[at - 1].integers)).apply(model)
            continue
        for path, spec in files:
            with DeltaFile.open(path, spec) as delta:
                apply_delta(model, delta)
