"""Differentially private merges on the hub: the noise seed of a round, and the tensors that an update may contain.

A seed belongs to one list of updates and one way of merging them. It is drawn when the merge begins and stored for the
operator only. A repeated merge, after a crash or in a replay, adds exactly the same noise.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch
from sqlalchemy import select

from gym_fed.config.hub.privacy import AdaptiveClipping, ReleasePrivacy
from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.task import TaskSpec, TrainingRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.policy import part_of
from gym_fed.privacy.noise import SEED_BYTES
from gym_fed.soup.private import FrozenA, PrivateMerge, PrivateReport
from gym_server.privacy.budget import clipping_norm
from gym_server.store.database import Database
from gym_server.store.tables import privacy_seeds

_RECORDED = ("mechanism", "noise_multiplier", "clipping_norm", "clipping", "adaptive_clipping")


def begin_merge(
    config: ServerConfig,
    base: BaseSpec,
    database: Database,
    spec: TaskSpec | None,
    merging: Sequence[str],
    root: str | None = None,
) -> PrivateMerge | None:
    """Return the parameters of a private merge of these updates; None if the hub promises no privacy.

    The same list, merged by the same rules with the same root update (its sha256), gets the same seed; any other merge
    gets a different seed.
    """
    privacy = config.privacy
    if privacy is None or spec is None:
        return None
    clip = clipping_norm(config, database)
    settings = {**privacy.model_dump(mode="json"), "clipping_norm": clip}
    rules = {
        "privacy": {key: settings[key] for key in _RECORDED},
        "soup": config.soup.model_dump(mode="json"),
    }
    if root is not None:
        rules["root"] = {"sha256": root}
    seed = draw_seed(database, spec.server_round, canonical_digest({"merging": sorted(merging), **rules}))
    return private_round(rules["privacy"], spec, base, seed)


def private_round(recorded: dict[str, Any], spec: TaskSpec, base: BaseSpec, seed: bytes) -> PrivateMerge:
    """Restore a private merge from a version's ledger fields (``entry_fields``), the round's task and its seed."""
    adaptive = recorded["adaptive_clipping"]
    return PrivateMerge(
        ReleasePrivacy.model_validate(
            {key: recorded[key] for key in _RECORDED if key != "adaptive_clipping"}
        ),
        seed,
        trained_tensors(spec.recipe, base),
        _frozen_a(spec),
        AdaptiveClipping.model_validate(adaptive) if adaptive else None,
    )


def entry_fields(private: PrivateMerge | None, report: PrivateReport | None) -> dict[str, Any] | None:
    """Return fields for the version's ledger entry; with the operator's seed they reproduce the noise."""
    if private is None or report is None:
        return None
    return {
        **private.privacy.model_dump(mode="json", include={*_RECORDED}),
        "adaptive_clipping": private.adaptive.model_dump(mode="json") if private.adaptive else None,
        "coordinates": report.coordinates,
        "next_clipping_norm": report.next_clipping_norm,
        "seed_sha256": hashlib.sha256(private.seed).hexdigest(),
    }


def seed_of(database: Database, seed_sha256: str) -> bytes:
    """Return the seed of a committed round.

    Raises:
        GymError: ``STATE_CORRUPT`` if it is missing from the database.
    """
    with database.reading() as tx:
        seed = tx.scalar(select(privacy_seeds.c.seed).where(privacy_seeds.c.seed_sha256 == seed_sha256))
    if seed is None or hashlib.sha256(seed).hexdigest() != seed_sha256:
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"the noise seed with sha256 {seed_sha256} is missing or was changed",
            "restore the hub's folder from a backup",
        )
    return bytes(seed)


def trained_tensors(recipe: TrainingRecipe, base: BaseSpec) -> list[str]:
    """Return the sorted names of the tensors that an update may contain, which depend only on the recipe.

    For LoRA on ``all-linear``, these are all matrices except embeddings and head, identified by their names.
    """
    if not recipe.sends_factors:
        return sorted(base.shapes)
    targets = recipe.lora.target_modules
    found = []
    for name, shape in sorted(base.shapes.items()):
        module = name.removesuffix(".weight")
        if len(shape) != 2 or module == name:
            continue
        if targets == "all-linear":
            trained = part_of(name, tuple(shape)) == "body"
        else:
            trained = any(module == target or module.endswith(f".{target}") for target in targets)
        if trained:
            found.append(name)
    return found


def _frozen_a(spec: TaskSpec) -> FrozenA | None:
    if not spec.recipe.sends_factors:
        return None
    from gym_fed.training.tuning.lora import frozen_factor

    seed, rank = spec.recipe.seed + spec.server_round, spec.recipe.lora.r
    dtype = torch.float32 if spec.codec.factors == "float32" else torch.bfloat16

    def factor(name: str, cols: int) -> torch.Tensor:
        return frozen_factor(seed, name.removesuffix(".weight"), rank, cols).to(dtype)

    return factor


def draw_seed(database: Database, server_round: int, merging: str) -> bytes:
    """Return the seed of a round's noise, which is drawn at the first call for ``merging`` and stored.

    Args:
        merging: Digest of the list of updates and of everything that determines the merge, so that no two merges share
            a seed.
    """
    where = (privacy_seeds.c.server_round == server_round) & (privacy_seeds.c.merging == merging)
    with database.transaction() as tx:
        seed = tx.scalar(select(privacy_seeds.c.seed).where(where))
        if seed is None:
            seed = os.urandom(SEED_BYTES)
            tx.execute(
                privacy_seeds.insert().values(
                    server_round=server_round,
                    merging=merging,
                    seed=seed,
                    seed_sha256=hashlib.sha256(seed).hexdigest(),
                )
            )
    return bytes(seed)
