"""Length evidence: which long updates, and which soup length, lower the loss on the coordinator's clean rows.

It is measured once, during a round's merge, and recorded in the version's ledger entry, from which a replay reads it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest
from gym_fed.core.registries import AGGREGATORS
from gym_fed.data.rows import as_kind
from gym_fed.delta.base import model_tensors
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.aggregators.byzantine_evidence import LENGTHS
from gym_fed.soup.gram import Needs, RowEvidence
from gym_fed.soup.merging import claims
from gym_server.rounds.hub_model import HubModel, coordinator_rows
from gym_server.rounds.merge_progress import MergeProgress
from gym_server.rounds.screens import ScreenedUpdate
from gym_server.state import HubState


@dataclass(frozen=True)
class LengthEvidence:
    """The length evidence of one round.

    Attributes:
        rows: Digest of the clean rows.
        verdicts: For each update, True if it keeps its full length; False for updates that are not long.
        length: Length of the soup, as a fraction of its full length.
    """

    rows: str
    verdicts: Mapping[str, bool]
    length: float

    def of(self, updates: Sequence[str]) -> RowEvidence:
        """Return the evidence in the form that the merge of these updates (ids) uses."""
        return RowEvidence([self.verdicts[update] for update in updates], self.length)

    @classmethod
    def recorded(cls, fields: Mapping[str, Any], updates: Sequence[str]) -> LengthEvidence:
        """Read the evidence on these updates (ids) from a version's ledger entry.

        Raises:
            GymError: ``STATE_CORRUPT``.
        """
        try:
            found = cls(**fields)
            known = isinstance(found.rows, str) and all(
                found.verdicts[name] in (True, False) for name in updates
            )
        except (TypeError, KeyError):
            known = False
        if not known or found.length not in LENGTHS:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                "the evidence of the version must be the rows' digest, a verdict for each update, and a length of "
                f"{', '.join(map(str, LENGTHS))}",
            )
        return found

    def entry_fields(self) -> dict[str, Any]:
        """Return the fields of the version's ledger entry."""
        return asdict(self)


def uses_evidence(config: ServerConfig) -> bool:
    """Return True if the config's rule uses evidence and the coordinator has rows for it."""
    return config.root is not None and AGGREGATORS.type_of(config.soup.aggregator).needs is Needs.EVIDENCE


def find_evidence(
    state: HubState,
    config: ServerConfig,
    model: HubModel,
    recipe: SoupRecipe,
    kept: Sequence[ScreenedUpdate],
    weights: Sequence[float],
    root_update: str | None,
    progress: MergeProgress,
) -> LengthEvidence | None:
    """Measure how lengths affect the loss, with one pass over the rows per long update plus up to seven.

    If the lengths that lower the loss individually do not lower it together, none is kept. The soup gets the length
    from ``LENGTHS`` with the lowest loss (on a tie, the longer one), or its full length with a server optimizer.

    Args:
        state: The hub's state.
        config: The hub's config.
        model: The model at the version that the updates start from; not changed.
        recipe: The rules of the round.
        kept: The updates that are merged.
        weights: Their weights.
        root_update: sha256 of the coordinator's own update.
        progress: Progress of the merge.

    Returns:
        The evidence; None if the rule uses none or there are no rows.

    Raises:
        GymError: Errors from the data and ``gym_fed.soup.merging``.
    """
    root = config.root
    if root is None or not uses_evidence(config):
        return None
    rows = as_kind(
        coordinator_rows(root.data, root.format, root.max_examples, state.folder, "train"), "supervised"
    )
    with contextlib.ExitStack() as stack:
        paths = [update.path for update in kept]
        if root_update is not None:
            paths.append(state.store.local_path(root_update))
        files = [stack.enter_context(DeltaFile.open(path, model.spec)) for path in paths]
        own = files.pop() if root_update is not None else None
        base, claimed = claims(files, weights, recipe, model.spec, own)
    rate = recipe.server_learning_rate
    parts = [(update.path, rate * share) for update, share in zip(kept, base, strict=True) if share]
    excesses = [(update, rate * claim) for update, claim in zip(kept, claimed, strict=True) if claim]
    progress.begin("weighing long updates", 2 + len(excesses))
    verdicts = dict.fromkeys((update.row.update_id for update in kept), False)
    with model.applied_sum(parts):
        before = model.loss_on(rows)
        progress.step()

        def lowers(added: Sequence[tuple[ScreenedUpdate, float]]) -> bool:
            with model.applied_sum([(update.path, share) for update, share in added]):
                after = model.loss_on(rows)
            return math.isfinite(after) and after < before

        useful = []
        for excess in excesses:
            if lowers([excess]):
                useful.append(excess)
            progress.step()
        # Long updates that help individually may overshoot together, as those of a coalition with one direction do.
        if len(useful) > 1 and not lowers(useful):
            useful = []
    verdicts.update((update.row.update_id, True) for update, _ in useful)
    soup = [*parts, *((update.path, excess) for update, excess in useful)]
    # A server optimizer's step has a different direction from the soup, so the soup's best length does not apply.
    length = _best_length(model, soup, rows) if recipe.server_optimizer == "none" else 1.0
    progress.step()
    return LengthEvidence(canonical_digest({"gym-root-1": [model.max_length, rows]})[:32], verdicts, length)


def _best_length(
    model: HubModel, soup: Sequence[tuple[Path, float]], rows: Sequence[dict[str, Any]]
) -> float:
    """Return the length from ``LENGTHS`` at which a weighted sum of deltas has the lowest loss on the rows.

    If no loss is finite, return the shortest and leave the decision to the gate.
    """
    best, lowest, last = LENGTHS[-1], math.inf, 1.0
    with model.applied_sum(soup) as before:
        tensors = model_tensors(model.model)
        for length in LENGTHS:
            with torch.no_grad():
                for name, tensor in before.items():
                    tensors[name].copy_(torch.lerp(tensor, tensors[name], length / last))
            loss, last = model.loss_on(rows), length
            if loss < lowest:
                best, lowest = length, loss
    return best
