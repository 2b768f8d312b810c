"""Which base a store's variants belong to, for a server that was given none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.store.naming import is_here
from gym_fed.serving.store.store import VariantStore


def base_of_store(folder: Path) -> str | None:
    """The one model that all variants of a store are for; None where there are no variants.

    Raises:
        GymError: ``USAGE`` for variants of several bases, and for a base that this machine does not know by the name
            in its variants; as ``VariantStore.open``.
    """
    names: dict[str, Counter[str]] = {}
    with VariantStore.open(folder, create=False, require_signature=False) as store:
        for record in store.list():
            names.setdefault(record.base_digest, Counter())[record.base_model] += 1
    if not names:
        return None
    if len(names) > 1:
        found = ", ".join(
            f"{' or '.join(sorted(called))} ({digest[:19]}, {counted(called.total(), 'variant')})"
            for digest, called in sorted(names.items())
        )
        raise GymError(
            ErrorCode.USAGE,
            f"the variants in {folder} have {len(names)} bases: {found}",
            "name the one to serve: --base MODEL",
        )
    called = next(iter(names.values()))
    for name, _ in called.most_common():
        if is_here(name):
            return name
    raise GymError(
        ErrorCode.USAGE,
        f"the variants in {folder} are of base {' or '.join(sorted(called))}, "
        "which is no model of this machine by that name alone",
        "name its folder: --base FOLDER; a model of the Hub is fetched by gym models pull NAME",
    )
