"""A store with signed variants of gym-nano: random sign deltas, each with an owner of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gym_fed.base.models import load_model
from gym_fed.delta.base import BaseSpec
from gym_fed.serving.store.signing import sign_variant
from gym_fed.serving.store.store import VariantStore
from gym_fed.trust.identity.keys import SigningKey
from tests.support.variants import Coding, write_random_delta


def signs(_name: str, shape: tuple[int, ...]) -> Coding:
    return ("bitdelta", {}) if len(shape) == 2 else None


def nano_store(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Make a store in ``folder``.

    Returns:
        The owner of each variant.
    """
    model = load_model("gym-nano").model
    owners = {}
    with VariantStore.open(folder, base=BaseSpec.of(model, "gym-nano")) as store:
        for seed, name in enumerate(names):
            key = SigningKey.generate()
            delta = write_random_delta(model, folder / f"{name}.gymdelta", signs, seed=seed, size=0.1)
            store.add(delta, sign_variant(delta, key, name=name), name=name, owner=key.contributor)
            owners[name] = key.contributor
    return owners
