"""Find groups of contributors whose updates persistently disagree, and build a variant of the base for each.

If two parts of a community train on data with different targets (two languages, two styles), their updates keep
pointing in different directions, and the common version is a compromise. Contributors are split by the mean cosine of
their updates over rounds (Sattler et al. 2019, "Clustered Federated Learning", arXiv 1910.01991, which splits by the
cosines of one round). Each group's variant is the base with the soups of that group's updates in place of the common
ones. The variant is offered only if it lowers the held-out loss by more than the error of the measurement.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder
from gym_fed.core.text import counted
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.evaluation.loss import RowLosses
from gym_fed.soup.merging import inner_products
from gym_fed.soup.stacks import stacks_of
from gym_server.evaluations.groups import CommunityGroups, GroupResult
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.replay import ingredients_of
from gym_server.rounds.soups import Ingredients, make_soup
from gym_server.state import HubState

MIN_MEMBERS = 2
"""Minimum size of a group; a variant for a single contributor is a personal variant."""
MAX_ROUNDS = 10
_MIN_ROUNDS = 2
"""Minimum number of rounds with a merged update before a contributor is assigned to a group."""
_STANDARD_ERRORS = 2.0


def find_groups(
    state: HubState,
    config: ServerConfig,
    output: Path | None = None,
    max_rounds: int = MAX_ROUNDS,
    on_step: Callable[[str], object] = lambda _: None,
) -> CommunityGroups:
    """Split the contributors of the last rounds into two groups, and measure a variant of the base for each.

    A held-out row is assigned to the group whose variant fits its even tokens better, and gains are measured on its odd
    tokens, so that the assignment does not favour either.

    Args:
        state: The hub's state.
        config: The hub's config.
        output: New folder for the variants, ``group-1.gymdelta`` and ``group-2.gymdelta``; None discards them.
        max_rounds: Number of committed rounds to use, counted back from the current version.
        on_step: Called with a description of each step before it begins.

    Raises:
        GymError: ``CONFIG_INVALID`` in continuous mode, with privacy or secure aggregation, or if there are no held-out
            rows; ``NOT_FOUND`` if there are fewer than two committed rounds; ``FILE_EXISTS`` for an output folder that
            is not empty; errors from ``ingredients_of``.
    """
    _require_open(config)
    if output is not None and output.exists() and any(output.iterdir()):
        raise GymError(ErrorCode.FILE_EXISTS, f"{output} is not empty", "choose a new folder")
    head = state.round_store.head()
    numbers = [soup.server_round for soup in state.round_store.soups(head.height)][-max_rounds:]
    if len(numbers) < _MIN_ROUNDS:
        raise GymError(
            ErrorCode.NOT_FOUND,
            f"groups are found from at least {_MIN_ROUNDS} rounds, but version {head.height} has "
            f"{counted(len(numbers), 'round')}",
            "wait for more rounds",
        )
    on_step("comparing updates")
    rounds = [ingredients_of(state, number) for number in numbers]
    names, similarity = _mean_cosines(state, rounds)
    sides = split(similarity) if len(names) >= 2 * MIN_MEMBERS else np.zeros(len(names), dtype=bool)
    members = [
        [name for name, side in zip(names, sides, strict=True) if side == wanted] for wanted in (True, False)
    ]
    within, between = _means(similarity, sides)
    found: list[GroupResult] = []
    if min(map(len, members)) >= MIN_MEMBERS:
        with tempfile.TemporaryDirectory(dir=state.folder / "staging", prefix="groups-") as scratch:
            if output is not None:
                make_folder(output)
            found = _measured(state, config, rounds, members, output or Path(scratch), head.height, on_step)
    return CommunityGroups(
        height=head.height,
        first_round=numbers[0],
        last_round=numbers[-1],
        within=within,
        between=between,
        groups=found,
    )


def split(similarity: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Split n items in two by the sign of the leading eigenvector of the centred similarities ``[n, n]``.

    The diagonal is ignored. The group of the first item is True.
    """
    values = similarity.copy()
    count = len(values)
    np.fill_diagonal(values, (values.sum(1) - values.diagonal()) / max(1, count - 1))
    centred = values - values.mean(0) - values.mean(1)[:, None] + values.mean()
    leading = np.linalg.eigh((centred + centred.T) / 2)[1][:, -1]
    sides: NDArray[np.bool_] = (leading >= 0) == (leading[0] >= 0)
    return sides


def _require_open(config: ServerConfig) -> None:
    if config.rounds.mode == "continuous":
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            "rounds.mode: continuous: groups are found by comparing updates of one version",
            "groups need synchronous rounds",
        )
    for section in ("privacy", "secure_aggregation"):
        if getattr(config, section) is not None:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"{section}: groups are found by comparing the updates of single contributors",
                "remove this section to find groups",
            )
    if config.gate.heldout is None:
        raise GymError(
            ErrorCode.CONFIG_INVALID, "the gain of a group is measured on held-out data", "set gate.heldout"
        )


def _mean_cosines(state: HubState, rounds: Sequence[Ingredients]) -> tuple[list[str], NDArray[np.float64]]:
    """Return the contributors of at least ``_MIN_ROUNDS`` rounds, and the mean cosines ``[n, n]`` of their updates.

    Two contributors with no round in common get the mean of all other pairs.
    """
    seen: dict[str, int] = {}
    sums: dict[tuple[str, str], list[float]] = {}
    for round_ in rounds:
        who = [manifest.contributor for manifest in round_.manifests]
        for name in set(who):
            seen[name] = seen.get(name, 0) + 1
        cosines = _cosines(state, round_)
        for i, first in enumerate(who):
            for j, second in enumerate(who[:i]):
                if first != second:
                    sums.setdefault((min(first, second), max(first, second)), []).append(float(cosines[i, j]))
    names = sorted(name for name, count in seen.items() if count >= _MIN_ROUNDS)
    means = {pair: sum(found) / len(found) for pair, found in sums.items()}
    usual = sum(means.values()) / len(means) if means else 0.0
    matrix = [[means.get((min(a, b), max(a, b)), usual) for b in names] for a in names]
    return names, np.asarray(matrix, dtype=np.float64).reshape(len(names), len(names))


def _cosines(state: HubState, round_: Ingredients) -> NDArray[np.float64]:
    spec = BaseSpec(state.base.model_name, round_.parent.digest, state.base.shapes)
    with ExitStack() as stack:
        files = [
            stack.enter_context(DeltaFile.open(state.store.local_path(manifest.delta_sha256), spec))
            for manifest in round_.manifests
        ]
        norms = [file.norm() for file in files]
        products = inner_products(stacks_of(files, spec), norms).numpy()
    lengths = np.maximum(np.asarray(norms), np.finfo(np.float64).tiny)
    cosines: NDArray[np.float64] = products / lengths[:, None] / lengths
    return cosines


def _means(similarity: NDArray[np.float64], sides: NDArray[np.bool_]) -> tuple[float, float]:
    """Return the mean similarity within groups and between groups; 0.0 if there are no such pairs."""
    same = sides[:, None] == sides
    apart = ~np.eye(len(sides), dtype=bool)
    inside, across = similarity[same & apart], similarity[~same]
    return (float(inside.mean()) if inside.size else 0.0, float(across.mean()) if across.size else 0.0)


def _measured(
    state: HubState,
    config: ServerConfig,
    rounds: Sequence[Ingredients],
    members: Sequence[Sequence[str]],
    folder: Path,
    height: int,
    on_step: Callable[[str], object],
) -> list[GroupResult]:
    """Write the groups' variants to ``folder`` and measure them."""
    model = HubModel.of(state, config)
    paths, skipped = [], []
    for number, group in enumerate(members, start=1):
        on_step(f"merging the updates of group {number}")
        paths.append(folder / f"group-{number}.gymdelta")
        skipped.append(_write_variant(state, model, rounds, group, paths[-1]))
    on_step("measuring the variants")
    model.follow(state.round_store.soups(height))
    common = model.half_losses()
    model.follow([])
    own = []
    for path in paths:
        with model.applied(path):
            own.append(model.half_losses())
    fits = own[0][0].sums <= own[1][0].sums
    return [
        _result(group, rounds_skipped, common[1], losses[1], chosen)
        for group, rounds_skipped, losses, chosen in zip(members, skipped, own, (fits, ~fits), strict=True)
    ]


def _result(
    group: Sequence[str], skipped: list[int], common: RowLosses, own: RowLosses, chosen: NDArray[np.bool_]
) -> GroupResult:
    counts = common.counts[chosen]
    total, rows = float(counts.sum()), len(counts)
    if not total:
        return GroupResult(
            contributors=list(group),
            num_rows=rows,
            common=0.0,
            own=0.0,
            gain=0.0,
            stderr=0.0,
            is_offered=False,
            skipped_rounds=skipped,
        )
    gains = common.sums[chosen] - own.sums[chosen]
    gain = float(gains.sum()) / total
    residuals = gains - gain * counts  # residuals of a ratio of sums over rows
    stderr = math.sqrt(float((residuals**2).sum()) * rows / max(1, rows - 1)) / total
    return GroupResult(
        contributors=list(group),
        num_rows=rows,
        common=float(common.sums[chosen].sum()) / total,
        own=float(own.sums[chosen].sum()) / total,
        gain=gain,
        stderr=stderr,
        is_offered=rows > 1 and gain > _STANDARD_ERRORS * stderr,
        skipped_rounds=skipped,
    )


def _write_variant(
    state: HubState, model: HubModel, rounds: Sequence[Ingredients], group: Sequence[str], path: Path
) -> list[int]:
    """Write the base with the group's soups as a delta of the base; return the rounds that were skipped."""
    model.follow([])
    spec = model.spec
    base = {name: tensor.detach().clone() for name, tensor in model_tensors(model.model).items()}
    parent = rounds[0].parent
    model.follow(state.round_store.soups(parent.height) if parent.height else [])
    skipped = []
    with model.borrowed():
        for round_ in rounds:
            part = _part_of(round_, set(group))
            if part is None:
                skipped.append(round_.server_round)
                continue
            with _soup_of(state, part) as delta:
                apply_delta(model.model, delta)
        with torch.no_grad():
            encode_delta(model.model, base, CodecPolicy(error_feedback=False), path, spec)
    return skipped


def _part_of(round_: Ingredients, group: set[str]) -> Ingredients | None:
    """Return the round with only a group's updates; None if there are too few of them for its rule."""
    kept = [i for i, manifest in enumerate(round_.manifests) if manifest.contributor in group]
    malicious = round_.recipe.num_malicious_nodes * len(kept) // max(1, len(round_.manifests))
    recipe = round_.recipe.model_copy(
        update={
            "num_malicious_nodes": malicious,
            "server_optimizer": "none",
            "server_optimizer_options": {},
            "codec": CodecPolicy(codec="as-merged", dense_dtype="float32", error_feedback=False),
        }
    )
    try:
        recipe.check_feasible(len(kept))
    except GymError:
        return None
    weights = None if round_.weights is None else [round_.weights[i] for i in kept]
    manifests = [round_.manifests[i] for i in kept]
    # The length evidence was measured on the common soup, so the group's soup uses the rule's own length limit.
    return replace(round_, recipe=recipe, manifests=manifests, weights=weights, evidence=None)


@contextmanager
def _soup_of(state: HubState, part: Ingredients) -> Iterator[DeltaFile]:
    spec = BaseSpec(state.base.model_name, part.parent.digest, state.base.shapes)
    with tempfile.TemporaryDirectory(dir=state.folder / "staging", prefix="group-soup-") as folder:
        soup = make_soup(state, part, Path(folder) / "soup.gymdelta")
        with DeltaFile.open(soup.path, spec) as delta:
            yield delta
