"""Compute the sum of the survivors' votes from the revealed shares, for the merge and for a replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.base import BaseSpec
from gym_fed.privacy.secure_aggregation.keys import SECRET_BYTES, Mask, commitment, pair_mask, public_of
from gym_fed.privacy.secure_aggregation.messages import TRAIN, UNMASK, Advert, Revealed
from gym_fed.privacy.secure_aggregation.shares import join_secret
from gym_fed.privacy.secure_aggregation.votes import bits_for, sum_masked
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_server.privacy.secure_stages import Stages
from gym_server.rounds.round_store import Round
from gym_server.state import HubState


@dataclass(frozen=True)
class SecureSum:
    """The inputs of a secure round's soup.

    Attributes:
        paths: Files of the survivors' masked votes.
        masks: Masks to add, which cancel the remaining masks in the sum.
        bits: Number of bits k of the files.
        step_norm: L2 norm of the step that one contributor's votes represent.
        threshold: Number of shares needed to recover a secret.
    """

    paths: Sequence[Path]
    masks: Sequence[Mask]
    bits: int
    step_norm: float
    threshold: int

    @property
    def voters(self) -> int:
        return len(self.paths)

    def sums(self, spec: BaseSpec) -> Iterator[tuple[str, NDArray[np.int16]]]:
        """Yield name and ``[size]`` sums of votes; see ``sum_masked``."""
        return sum_masked(self.paths, spec, self.masks, self.bits)

    def entry_fields(self) -> dict[str, Any]:
        """Return fields for the version's ledger entry; with objects and shares they reproduce the sum."""
        return {
            "voters": self.voters,
            "threshold": self.threshold,
            "bits": self.bits,
            "step_norm": self.step_norm,
        }


def secure_sum(
    state: HubState, server_round: int, manifests: Sequence[UpdateManifest], threshold: int, step_norm: float
) -> SecureSum:
    """Return the sum of a round after its unmask stage.

    Args:
        state: The hub's state.
        server_round: Number of the round.
        manifests: Manifests of the updates to merge, which must be those of all survivors, since no votes can be
            removed.
        threshold: Number of shares needed to recover a secret.
        step_norm: L2 norm of the step that one contributor's votes represent.

    Raises:
        GymError: ``ROUND_ABORTED`` if secrets cannot be recovered, or the updates are not those of the survivors.
    """
    stages = Stages(state.database, state.clock.now)
    members, survivors = ids(stages, server_round, TRAIN), ids(stages, server_round, UNMASK)
    if len(manifests) != len(survivors):
        raise GymError(
            ErrorCode.ROUND_ABORTED,
            f"the sum contains the votes of {counted(len(survivors), 'contributor')}, only {len(manifests)} "
            "of whom may be merged, and no votes can be removed from a sum",
        )
    masks = recover(
        members, survivors, stages.replies(server_round, UNMASK, Revealed).values(), threshold, server_round
    )
    paths = [state.store.local_path(manifest.delta_sha256) for manifest in manifests]
    return SecureSum(paths, masks, bits_for(len(members)), step_norm, threshold)


def secure_ingredient(
    state: HubState, config: ServerConfig, current: Round, manifests: Sequence[UpdateManifest]
) -> SecureSum | None:
    """Return the sum of the current round; None without secure aggregation."""
    secure = config.secure_aggregation
    if secure is None:
        return None
    threshold = secure.threshold
    if current.spec is not None and current.spec.secure_aggregation is not None:
        threshold = current.spec.secure_aggregation.threshold
    step = secure.step_norm if config.privacy is None else config.privacy.clipping_norm
    assert step is not None  # ensured by the config
    return secure_sum(state, current.server_round, manifests, threshold, step)


def ids(stages: Stages, server_round: int, name: str) -> dict[str, Advert]:
    """Return the signed keys of a stage's members by their ids in the round, sorted."""
    found = (signed.advert for signed in stages.adverts(server_round, name).values())
    return {advert.contributor: advert for advert in sorted(found, key=lambda advert: advert.contributor)}


def recover(
    members: dict[str, Advert],
    survivors: dict[str, Advert],
    revealed: Sequence[Revealed] | Any,
    threshold: int,
    server_round: int,
) -> list[Mask]:
    """Return the masks to add to the survivors' sum: inverses of their own masks, and the dropouts' pairwise masks.

    Args:
        members: Members who masked their votes.
        survivors: Members whose masked votes are in the sum.
        revealed: Answers, checked to contain only dealt shares.
        threshold: Number of answers needed.
        server_round: Number of the round.

    Raises:
        GymError: ``ROUND_ABORTED`` if a recovered secret differs from the one that its owner signed.
    """
    answers = list(revealed)
    masks = []
    for own, advert in survivors.items():
        shares = [bytes.fromhex(answer.seeds[own]) for answer in answers]
        seed = join_secret(shares, threshold, _is_seed(advert), own, "the seed")
        masks.append(Mask(seed).inverse)
    for gone, advert in members.items():
        if gone in survivors:
            continue
        shares = [bytes.fromhex(answer.mask_keys[gone]) for answer in answers]
        private = join_secret(shares, threshold, _is_private_key(advert), gone, "the mask key")
        for own, other in survivors.items():
            public = bytes.fromhex(other.mask_key)
            masks.append(pair_mask(own, gone, private, public, advert.server, server_round).inverse)
    return masks


def _is_seed(advert: Advert):  # type: ignore[no-untyped-def]
    return lambda found: len(found) == SECRET_BYTES and commitment(found) == advert.seed_commitment


def _is_private_key(advert: Advert):  # type: ignore[no-untyped-def]
    return lambda found: len(found) == SECRET_BYTES and public_of(found).hex() == advert.mask_key
