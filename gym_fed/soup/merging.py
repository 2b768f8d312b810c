"""Merge a round's updates into one soup, tensor by tensor in blocks of rows.

Memory use is a few blocks of numbers besides the updates. Merged tensors are stored in a scratch file next to the
result until they are encoded; a server optimiser's moments and the factors of one LoRA tensor are in memory. Every step
is elementwise or runs in a fixed order without a BLAS, so the same updates in the same order give the same bytes with
any number of threads and any kernels. Sign deltas are merged by integer votes, so even the order does not matter.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from gym_quant.codec import as_matrix
from torch import Tensor

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import EncodeReport, encode_source
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.adapters import write_adapters
from gym_fed.soup.aggregator import Aggregator
from gym_fed.soup.building import build_optimizer
from gym_fed.soup.gram import CombinationWeights, GramMatrix, Needs, RowEvidence
from gym_fed.soup.optimizer import OptimizerState
from gym_fed.soup.pipeline import Pipeline
from gym_fed.soup.private import PrivateMerge, PrivateReport, RootGateView, private_stacks
from gym_fed.soup.stacks import Stack, stacks_of
from gym_fed.soup.window import RoundWindow

_COMFORTABLE = 2.0**30
"""Norms between this and its inverse need no rescaling before products are computed in float32."""


@dataclass(frozen=True)
class SoupReport:
    """The report of a merge.

    Attributes:
        sha256: Lower-case hex sha256 of the soup.
        size_bytes: Its size.
        norm: L2 norm of the delta it decodes to.
        update_norms: L2 norm of each update, in the given order.
        clip_factors: Clipping factor of each update; 1.0 if it was within ``max_norm``.
        coefficients: Weight of each update in the aggregate; None for coordinate-wise rules.
        encoding: Codec of each tensor of the soup, and the reason for it.
        lost: For LoRA factors truncated to a rank: the share of each tensor's norm that the rank leaves out.
        private: The report of a merge with differential privacy; ``update_norms`` and ``clip_factors`` are empty then.
        admitted: Admitted weight of each update of a continuous round (``RoundWindow.added``); None for other rounds.
    """

    sha256: str
    size_bytes: int
    norm: float
    update_norms: tuple[float, ...]
    clip_factors: tuple[float, ...]
    coefficients: tuple[float, ...] | None
    encoding: EncodeReport = field(repr=False)
    lost: Mapping[str, float] = field(default_factory=dict, repr=False)
    private: PrivateReport | None = None
    admitted: tuple[float, ...] | None = None


def merge(
    updates: Sequence[DeltaFile],
    weights: Sequence[float],
    recipe: SoupRecipe,
    out_path: str | Path,
    spec: BaseSpec,
    residual: ErrorFeedback | None = None,
    extra: Mapping[str, str] | None = None,
    root: DeltaFile | None = None,
    optimizer_state: OptimizerState | None = None,
    residual_path: Path | None = None,
    on_tensor: Callable[[str], None] = lambda _: None,
    private: PrivateMerge | None = None,
    evidence: RowEvidence | None = None,
    window: RoundWindow | None = None,
) -> SoupReport:
    """Merge updates: clip, pre-aggregate, aggregate, take the server's step, encode. Updates may use different codecs.

    Memory use is a block of rows of all updates; for LoRA updates, all factors of one tensor in float64.

    Args:
        updates: Open deltas of ``spec``; a tensor that an update lacks counts as zero. With a window they may be of
            earlier versions: a delta is an increment, and is added to the newer version unchanged.
        weights: Positive weight of each update.
        recipe: The rules.
        out_path: Path of the soup, a ``.gymdelta`` of ``spec``.
        spec: The base of updates and soup.
        residual: The server's error feedback, required if and only if ``recipe.codec.error_feedback`` is set. The new
            residual takes effect when the caller commits it.
        extra: Free-form strings for the soup's manifest.
        root: The coordinator's own update, only for rules that need or use one.
        optimizer_state: State of ``recipe.server_optimizer``, required if and only if it is set; the caller stages it.
        residual_path: For LoRA factors merged into factors: path of the truncation residual, a separate delta.
        on_tensor: Called with the name of each merged tensor.
        private: Settings of a merge with differential privacy (``gym_fed.soup.private``); the mechanism must support
            the recipe.
        evidence: For rules with ``Needs.EVIDENCE``: the outcome of ``claims``; None without clean rows.
        window: The other updates that the rules weigh, in a continuous round.

    Raises:
        GymError: ``BASE_MISMATCH`` for an update of a different base, ``CONFIG_INVALID`` if the round is too small for
            the recipe, ``UPDATE_REFUSED`` if the aggregate overflows float32.
    """
    pipeline, optimizer = Pipeline.of(recipe), build_optimizer(recipe)
    weight = torch.tensor(list(weights), dtype=torch.float64)
    if window is None:
        _check(updates, weight, spec, pipeline, root)
    if (optimizer is None) != (optimizer_state is None):
        raise GymError(
            ErrorCode.USAGE, f"server_optimizer {recipe.server_optimizer!r} and the given state do not match"
        )
    if recipe.codec.error_feedback != (residual is not None):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"the soup's codec has error_feedback: {recipe.codec.error_feedback}, but "
            f"{'no' if residual is None else 'a'} residual was given",
        )
    private_report: PrivateReport | None = None
    norms: tuple[float, ...] = ()
    clips: tuple[float, ...] = ()
    coefficients: tuple[float, ...] | None = None
    admitted: tuple[float, ...] | None = None
    if private is not None:
        _refuse_unaccounted(private, recipe)
        gate = None if root is None else _root_gate_view(updates, root, spec, recipe.merge_version)
        stacks, private_report = private_stacks(updates, spec, pipeline.aggregator, private, gate)
        plan = CombinationWeights.identity(weight)
    else:
        norms = tuple(update.norm() for update in updates)
        clips = tuple(_clip_factor(norm, recipe.max_norm) for norm in norms)
        stacks = stacks_of(updates, spec, recipe.merge_version)
        if window is None:
            gram, clipping = _gram(
                stacks, updates, norms, clips, weight, pipeline, spec, root, recipe.merge_version
            )
            if evidence is not None:
                pipeline.check_evidence(evidence, len(updates))
                gram = replace(gram, evidence=evidence)
            plan = pipeline.plan(gram).after(clipping)
        else:
            plan, admitted = window_plan(updates, weights, recipe, spec, window)
        coefficients = tuple(plan.matrix[0].tolist()) if len(plan.matrix) == 1 else None
    report, lost = write_soup(
        stacks,
        plan,
        pipeline.aggregator,
        recipe,
        Path(out_path),
        spec,
        residual,
        extra,
        optimizer_state,
        residual_path,
        on_tensor,
    )
    made = (report.sha256, report.size_bytes, report.norm)
    return SoupReport(*made, norms, clips, coefficients, report, lost, private_report, admitted)


def window_plan(
    updates: Sequence[DeltaFile],
    weights: Sequence[float],
    recipe: SoupRecipe,
    spec: BaseSpec,
    window: RoundWindow,
) -> tuple[CombinationWeights, tuple[float, ...]]:
    """Weigh a window's updates by the recipe's rules; return ``RoundWindow.added`` of the result.

    Args:
        updates: The new updates.
        weights: Positive weight of each.
        recipe: The rules; the aggregator must weigh whole updates by their inner products.
        spec: The version that they are added to.
        window: The other updates.

    Raises:
        GymError: Errors of ``merge``.
    """
    pipeline, everyone = Pipeline.of(recipe), [*updates, *window.others]
    weight = torch.tensor([*weights, *window.other_weights], dtype=torch.float64)
    _check(everyone, weight, spec, pipeline, None, any_version=True)
    norms = tuple(update.norm() for update in everyone)
    clips = tuple(_clip_factor(norm, recipe.max_norm) for norm in norms)
    stacks = stacks_of(everyone, spec, recipe.merge_version)
    gram, clipping = _gram(stacks, everyone, norms, clips, weight, pipeline, spec, None, recipe.merge_version)
    combination, admitted = window.added(pipeline.plan(gram), gram.norms())
    own = clipping.matrix.diagonal()[: len(updates)]
    return CombinationWeights.single(combination.matrix[0] * own), admitted


def write_soup(
    stacks: Sequence[Stack],
    plan: CombinationWeights,
    aggregator: Aggregator,
    recipe: SoupRecipe,
    out_path: Path,
    spec: BaseSpec,
    residual: ErrorFeedback | None = None,
    extra: Mapping[str, str] | None = None,
    optimizer_state: OptimizerState | None = None,
    residual_path: Path | None = None,
    on_tensor: Callable[[str], None] = lambda _: None,
) -> tuple[EncodeReport, Mapping[str, float]]:
    """Merge every stack, take the server's step and encode; arguments as in ``merge``.

    Returns:
        The written file, and for LoRA factors truncated to a rank the lost share of each tensor's norm.
    """
    optimizer = build_optimizer(recipe)
    folder = out_path.parent
    folder.mkdir(parents=True, exist_ok=True)
    if optimizer is None:
        written = write_adapters(
            stacks,
            plan,
            aggregator,
            recipe.server_learning_rate,
            recipe.codec,
            out_path,
            spec,
            extra,
            residual_path,
            on_tensor,
        )
        if written is not None:
            return written
    if residual_path is not None:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            "only a soup of LoRA factors that is written as LoRA factors has a residual",
            "merge LoRA updates with a rule that weighs whole updates, with codec: lora and error_feedback: false",
        )
    with tempfile.TemporaryFile(dir=folder) as scratch:
        merged: dict[str, Tensor] = {}
        by_name = {stack.name: stack for stack in stacks}
        # a tensor that nobody sent has a zero aggregate, but its moments still decay
        unsent = [] if optimizer_state is None else [n for n in optimizer_state.tensors() if n not in by_name]
        for name in [*by_name, *unsent]:
            shape = as_matrix(spec.shapes[name])
            target = torch.from_numpy(np.memmap(scratch, np.float32, "w+", scratch.seek(0, 2), shape))
            if name in by_name:
                by_name[name].merge(plan, aggregator, target)
            if optimizer is not None and optimizer_state is not None:
                target.copy_(optimizer.step(name, target, optimizer_state))
            if recipe.server_learning_rate != 1.0:
                target.mul_(recipe.server_learning_rate)
            if not bool(torch.isfinite(target).all()):
                raise GymError(ErrorCode.UPDATE_REFUSED, f"tensor {name!r}: the aggregate overflows float32")
            merged[name] = target.reshape(spec.shapes[name])
            if name in by_name:
                by_name[name].release()
                on_tensor(name)

        def source(name: str) -> Tensor:
            return merged[name] if name in merged else torch.zeros(spec.shapes[name])

        version = recipe.merge_version
        return encode_source(source, recipe.codec, out_path, spec, residual, extra, version=version), {}


def inner_products(stacks: Sequence[Stack], norms: Sequence[float]) -> Tensor:
    """Return the ``[n, n]`` float64 inner products of whole updates, from bits, factors or decoded blocks.

    Args:
        stacks: Every tensor of the updates.
        norms: L2 norm of each update.
    """
    factors = torch.tensor([_power_of_two(norm) for norm in norms], dtype=torch.float64)
    total = torch.zeros(len(norms), len(norms), dtype=torch.float64)
    for stack in stacks:
        total += stack.products(factors)
        stack.release()
    return total / factors[:, None] / factors[None]


def claims(
    updates: Sequence[DeltaFile],
    weights: Sequence[float],
    recipe: SoupRecipe,
    spec: BaseSpec,
    root: DeltaFile | None = None,
) -> tuple[list[float], list[float]]:
    """Return the claims on which a rule with ``Needs.EVIDENCE`` needs verdicts; see ``Aggregator.claims``.

    Returns:
        Coefficients of soup_0, and the further coefficient that each update claims.

    Raises:
        GymError: See ``merge``.
    """
    pipeline, weight = Pipeline.of(recipe), torch.tensor(list(weights), dtype=torch.float64)
    pipeline.check_evidence()
    _check(updates, weight, spec, pipeline, root)
    norms = [update.norm() for update in updates]
    clips = [_clip_factor(norm, recipe.max_norm) for norm in norms]
    stacks = stacks_of(updates, spec, recipe.merge_version)
    gram, clipping = _gram(stacks, updates, norms, clips, weight, pipeline, spec, root, recipe.merge_version)
    base, claimed = pipeline.aggregator.claims(gram)
    factors = clipping.matrix.diagonal()
    return (base * factors).tolist(), (claimed * factors).tolist()


def _gram(
    stacks: Sequence[Stack],
    updates: Sequence[DeltaFile],
    norms: Sequence[float],
    clips: Sequence[float],
    weights: Tensor,
    pipeline: Pipeline,
    spec: BaseSpec,
    root: DeltaFile | None,
    version: int,
) -> tuple[GramMatrix, CombinationWeights]:
    """Return the inner products of the clipped updates that the rules need, and the clipping."""
    own: Tensor | None = None
    if root is not None:
        squares = _products_with_root(updates, norms, root, spec, version)
        products, own = squares[: len(updates), : len(updates)], squares[len(updates)]
    elif pipeline.needs >= Needs.PRODUCTS:
        products = inner_products(stacks, norms)
    else:
        products = torch.diag(torch.tensor([norm * norm for norm in norms], dtype=torch.float64))
    clipping = CombinationWeights.scaled(torch.tensor(list(clips), dtype=torch.float64), weights)
    return GramMatrix(products, weights, own).combined(clipping), clipping


def _products_with_root(
    updates: Sequence[DeltaFile], norms: Sequence[float], root: DeltaFile, spec: BaseSpec, version: int
) -> Tensor:
    """Return the ``[n + 1, n + 1]`` inner products with the root update last."""
    return inner_products(stacks_of([*updates, root], spec, version), [*norms, root.norm()])


def _root_gate_view(
    updates: Sequence[DeltaFile], root: DeltaFile, spec: BaseSpec, version: int
) -> RootGateView:
    """Flag the updates with a positive inner product with the root update."""
    norms = [update.norm() for update in updates]
    products = _products_with_root(updates, norms, root, spec, version)[len(updates), : len(updates)]
    return RootGateView(tuple(float(product) > 0.0 for product in products), root)


def _refuse_unaccounted(private: PrivateMerge, recipe: SoupRecipe) -> None:
    try:
        private.privacy.refuse_unaccounted(recipe)
    except ValueError as error:
        raise GymError(ErrorCode.CONFIG_INVALID, str(error)) from error


def _power_of_two(norm: float) -> float:
    return 1.0 if norm == 0.0 or 1 / _COMFORTABLE < norm < _COMFORTABLE else 2.0 ** -math.frexp(norm)[1]


def _clip_factor(norm: float, max_norm: float | None) -> float:
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm


def _check(
    updates: Sequence[DeltaFile],
    weights: Tensor,
    spec: BaseSpec,
    pipeline: Pipeline,
    root: DeltaFile | None,
    any_version: bool = False,
) -> None:
    if weights.numel() != len(updates):
        raise GymError(
            ErrorCode.USAGE, f"{counted(len(updates), 'update')} but {counted(weights.numel(), 'weight')}"
        )
    pipeline.check(weights)
    if pipeline.needs is not Needs.EVIDENCE and (root is not None) != (pipeline.needs is Needs.ROOT):
        raise GymError(
            ErrorCode.USAGE,
            f"aggregator {pipeline.aggregator.name!r} {'needs' if root is None else 'takes no'} root update",
        )
    for update in [*updates, *([root] if root is not None else [])]:
        if update.manifest.base_digest != spec.digest and not any_version:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{update.path} was made for base {update.manifest.base_digest}, not {spec.digest}",
            )
        for record in update.manifest.tensors:
            if spec.shapes.get(record.name) != record.shape:
                raise GymError(
                    ErrorCode.BASE_MISMATCH,
                    f"{update.path}: tensor {record.name!r} {list(record.shape)} is not one of the base's",
                )
