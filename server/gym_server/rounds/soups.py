"""The inputs of a round's soup, and the function that creates it, used by the merge and by its replay.

The soup's bytes depend only on the objects, the recipe, the parent version and the server's own state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.config.schema.plugins import PluginRecord, members_of, plugins_of, records
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256, make_folder
from gym_fed.core.registries import CODECS
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.building import build_optimizer
from gym_fed.soup.merging import SoupReport, merge
from gym_fed.soup.optimizer import OptimizerState
from gym_fed.soup.private import PrivateMerge
from gym_fed.soup.votes_soup import soup_from_votes
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_server.privacy.secure_unmask import SecureSum
from gym_server.rounds.continuous import WindowUpdates
from gym_server.rounds.evidence import LengthEvidence
from gym_server.rounds.versions import Version
from gym_server.state import HubState

NOTHING_YET = "none.safetensors"
RESIDUAL, OPTIMIZER = "residual", "optimizer"
"""Kinds of state that the server passes from round to round, with their names in the ledger."""


@dataclass(frozen=True)
class Ingredients:
    """The inputs that determine a soup.

    Attributes:
        server_round: Number of the round.
        parent: Version that the updates start from.
        recipe: The merge rules.
        manifests: Signed manifests of the merged updates, ordered by id.
        root: sha256 of the coordinator's own update, for rules that need one.
        private: Noise and clip of a merge with differential privacy.
        secure: Sum of the updates' votes, with secure aggregation.
        weights: Weights of the updates from reputations; None if the recipe sets them.
        evidence: Verdicts on the updates' lengths, for rules that need them if the coordinator has clean rows.
        window: The other updates that the rules weigh, in a continuous round.
    """

    server_round: int
    parent: Version
    recipe: SoupRecipe
    manifests: Sequence[UpdateManifest]
    root: str | None = None
    private: PrivateMerge | None = None
    secure: SecureSum | None = None
    weights: Sequence[float] | None = None
    evidence: LengthEvidence | None = None
    window: WindowUpdates | None = None

    @property
    def num_weighed(self) -> int:
        """Number of updates that the rules weigh."""
        return len(self.manifests) + (0 if self.window is None else len(self.window.others))

    def without(self, number: int) -> Ingredients:
        """Return the ingredients without one of the updates."""
        kept = [place for place in range(len(self.manifests)) if place != number]
        weights, window = self.weights, self.window
        return replace(
            self,
            manifests=[self.manifests[place] for place in kept],
            weights=None if weights is None else [weights[place] for place in kept],
            window=None
            if window is None
            else replace(window, staleness=[window.staleness[place] for place in kept]),
        )

    def weight_of(self) -> dict[str, float] | None:
        """Return ``weights`` by update."""
        if self.weights is None:
            return None
        return {m.digest: weight for m, weight in zip(self.manifests, self.weights, strict=True)}


@dataclass(frozen=True)
class Soup:
    """A soup on disk, and the state that the server passes to the next round.

    Attributes:
        report: Report of the merge.
        path: File of the soup.
        feedback: The server's new residual, not yet staged; None without error feedback.
        optimizer: The optimiser's new state, not yet staged; None without a server optimiser.
        plugins: Plug-ins needed to recreate the soup: rules, and codecs of updates.
    """

    report: SoupReport
    path: Path
    feedback: ErrorFeedback | None
    optimizer: OptimizerState | None
    plugins: Sequence[PluginRecord] = ()

    def stage(self, state: HubState, server_round: int) -> dict[str, str]:
        """Write the server's new state to files named after the round.

        Returns:
            sha256 of every written file, by ``RESIDUAL`` and ``OPTIMIZER``, for the ledger.
        """
        residuals, written = residuals_folder(state.folder), {}
        if self.optimizer is not None:
            self.optimizer.stage(residuals / optimizer_name(server_round), state.base.digest)
            written[OPTIMIZER] = file_sha256(residuals / optimizer_name(server_round))
        if self.feedback is not None:
            self.feedback.stage(residuals / residual_name(server_round))
            written[RESIDUAL] = file_sha256(residuals / residual_name(server_round))
        return written


def make_soup(
    state: HubState,
    ingredients: Ingredients,
    out_path: Path,
    on_tensor: Callable[[str], None] = lambda _: None,
) -> Soup:
    """Merge the updates into a soup; only ``out_path`` is written.

    Args:
        state: The hub's state.
        ingredients: Inputs of the merge.
        out_path: File of the soup.
        on_tensor: Called with the name of each merged tensor, except for masked votes, which are merged in one step.

    Raises:
        GymError: Errors from ``gym_fed.soup.merging``, ``NOT_FOUND`` for a missing object, and ``STATE_CORRUPT`` if the
            residual of the parent version is missing.
    """
    recipe, parent = ingredients.recipe, ingredients.parent
    spec = BaseSpec(state.base.model_name, parent.digest, state.base.shapes)
    own_state, lineage = state_files(state.folder, recipe, parent), state.base.digest
    feedback = optimizer = None
    if RESIDUAL in own_state:
        if parent.residual is not None and not own_state[RESIDUAL].exists():
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"the residual of version {parent.height} is missing: {own_state[RESIDUAL]}",
                "restore the hub's folder from a backup; without it, the rounding error of the last soup is lost",
            )
        feedback = ErrorFeedback.load(own_state[RESIDUAL], lineage)
    rule = build_optimizer(recipe)
    if rule is not None:
        optimizer = OptimizerState.load(own_state[OPTIMIZER], lineage, rule.rule)
    if ingredients.secure is not None:
        found = ingredients.secure
        report = soup_from_votes(
            found.sums(state.base),
            found.voters,
            found.bits,
            found.step_norm,
            recipe,
            out_path,
            spec,
            feedback,
            optimizer,
            ingredients.private,
        )
        return Soup(report, out_path, feedback, optimizer, plugins_of(recipe))
    with contextlib.ExitStack() as stack:

        def opened(sha256: str) -> DeltaFile:
            any_version = ingredients.window is not None
            return stack.enter_context(
                DeltaFile.open(state.store.local_path(sha256), spec, any_version=any_version)
            )

        files = [opened(manifest.delta_sha256) for manifest in ingredients.manifests]
        weights = ingredients.weights
        if weights is None:
            weights = recipe.weights([manifest.num_examples for manifest in ingredients.manifests])
        root = opened(ingredients.root) if ingredients.root else None
        window = None
        if ingredients.window is not None:
            window = ingredients.window.opened(stack, state.store.local_path, spec, recipe)
        report = merge(
            files,
            weights,
            recipe,
            out_path,
            spec,
            feedback,
            root=root,
            optimizer_state=optimizer,
            on_tensor=on_tensor,
            private=ingredients.private,
            evidence=None
            if ingredients.evidence is None
            else ingredients.evidence.of([manifest.digest for manifest in ingredients.manifests]),
            window=window,
        )
        codecs = {file.record(name).codec for file in files for name in file.names}
        used = records([*members_of(recipe), *((CODECS, codec) for codec in codecs)])
    return Soup(report, out_path, feedback, optimizer, used)


def residuals_folder(hub_folder: Path) -> Path:
    """Return the folder of the server's own state, with one file per version; create it if needed."""
    residuals = hub_folder / "residuals"
    make_folder(residuals)
    return residuals


def state_files(folder: Path, recipe: SoupRecipe, parent: Version) -> dict[str, Path]:
    """Return the paths, by kind, of the server's state after ``parent``, which a soup by ``recipe`` starts from."""
    residuals, files = residuals_folder(folder), {}
    if recipe.codec.error_feedback:
        files[RESIDUAL] = residuals / (parent.residual or NOTHING_YET)
    if recipe.server_optimizer != "none":
        files[OPTIMIZER] = residuals / optimizer_name(parent.server_round)
    return files


def soup_path(folder: Path, server_round: int) -> Path:
    """Return the path of a round's soup before its commit."""
    return folder / "staging" / f"soup-{server_round}.gymdelta"


def discard(folder: Path, server_round: int) -> None:
    """Delete the soup and state files of a round that creates no version."""
    residuals = residuals_folder(folder)
    for path in (
        soup_path(folder, server_round),
        residuals / residual_name(server_round),
        residuals / optimizer_name(server_round),
    ):
        path.unlink(missing_ok=True)


def residual_name(server_round: int) -> str:
    """Return the file name of the residual after a round."""
    return f"round-{server_round}.safetensors"


def optimizer_name(server_round: int) -> str:
    """Return the file name of the optimiser's state after a round; round 0 is the initial state."""
    return f"round-{server_round}.optimizer.safetensors" if server_round else NOTHING_YET
