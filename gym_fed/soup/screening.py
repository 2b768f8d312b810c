"""Screen a round's updates for outlying norms, and for copies of one update sent under several keys.

Scaling an entire update does not change its cosines, but scaling every tensor by a different factor does. Therefore the
cosines of single tensors are compared too, as a mean weighted by tensor size. For sign deltas, the share of equal signs
is compared, which does not depend on scales. If updates of a round use different codecs, values are compared with
signs: a dense update that is encoded again as signs keeps every sign, while the cosine falls to 0.8.

The similarity of honest updates depends on the model, the data and the steps. Each round therefore has its own
baseline: the median of all pairs is its background b, and a pair exceeds it by (cosine - b) / (1 - b). Two halves of
one update, split by coordinates, have a cosine of zero; they are detected by their complementary zeros. (This project;
the inner products are those that robust rules need anyway.)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gym_quant.kernels import sign_products
from gym_quant.registry import get_codec
from numpy.typing import NDArray

from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.manifest import TensorRecord
from gym_fed.soup.stacks import DecodedStack, FactorStack, SignStack, Stack, form_of, stacks_of


@dataclass(frozen=True)
class NormVerdict:
    """The norm of an update relative to the round's median, and the decision.

    Attributes:
        norm: L2 norm of the update.
        ratio: Norm over median; infinite for a norm above a median of zero.
        accepted: True if the update stays in the round.
        reason: Reason for a refusal, to show to the contributor; empty if accepted.
    """

    norm: float
    ratio: float
    accepted: bool
    reason: str


def screen_norms(norms: Sequence[float], ratio: float) -> list[NormVerdict]:
    """Refuse the norms above ``ratio`` times the median, and return a verdict on each, in order.

    While fewer than half of a round's updates are malicious, the median lies between honest norms.

    Args:
        norms: L2 norm of each update, finite and not negative.
        ratio: Maximum ratio of a norm to the median; at least 1.

    Raises:
        ValueError: For a ratio below 1 or a norm that is not finite.
    """
    if not ratio >= 1.0:
        raise ValueError(f"ratio {ratio} is below 1: half of all honest updates would be refused")
    if not all(math.isfinite(norm) and norm >= 0.0 for norm in norms):
        raise ValueError(f"norms {list(norms)} are not all finite and at least 0")
    if not norms:
        return []
    median = statistics.median(norms)
    return [_verdict(norm, median, ratio) for norm in norms]


def _verdict(norm: float, median: float, ratio: float) -> NormVerdict:
    multiple = norm / median if median > 0.0 else (math.inf if norm > 0.0 else 1.0)
    if multiple <= ratio:
        return NormVerdict(norm, multiple, True, "")
    reason = f"its norm {norm:.4g} is {multiple:.3g} times the median {median:.4g}, over {ratio:g} times"
    return NormVerdict(norm, multiple, False, reason)


Matrix = NDArray[np.float64]

_DIGITS = 6
"""Digits to which similarities are rounded, so that the order of a sum does not change the result."""

_DENSE = 0.9
_OF_CHANCE = 0.1
_MIN_BY_CHANCE = 30.0
_SAME_DATA = 0.8
"""Minimum corrected correlation of updates from the same data. Above its inverse, a contributor's reliability is too
small to be estimated."""
_COSINE_WITH_DENSE = {"signs": math.sqrt(2 / math.pi), "sparse": 0.3456}
"""Cosine of normal values with their signs, and with the largest 1/64 of them alone."""
_CORRELATIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_SPARSE_COSINES = (
    0.0,
    0.0125,
    0.0280,
    0.0498,
    0.0810,
    0.1253,
    0.1872,
    0.2728,
    0.3924,
    0.5690,
    0.7005,
    0.8729,
    1.0,
)
"""Cosine of the largest 1/64 of x and of y, for normal pairs with each of the correlations: E[xy; |x| > t, |y| > t]
over E[x^2; |x| > t], with t = 2.418, integrated numerically."""
_ROUNDING = 1e-9
"""Tolerance of means of links, so that the order of a sum does not change the result."""
_BEYOND_SPREAD = 2.5
"""Limit in median absolute deviations: 1.7 standard deviations of normal values, more if many pairs belong to one
person."""


@dataclass(frozen=True)
class Comparison:
    """Pairwise similarity of updates. Both matrices are symmetric, and 0 for an update of zeros.

    Attributes:
        similarity: ``[n, n]`` float64 similarities; 1 for updates that differ only in scales.
        cosine: ``[n, n]`` float64 cosines of the entire updates, as if all were dense.
    """

    similarity: Matrix
    cosine: Matrix


def compare(updates: Sequence[DeltaFile], spec: BaseSpec) -> Comparison:
    """Compare updates with each other.

    Args:
        updates: Open deltas of models shaped like ``spec``, of any versions. A tensor that is missing from an update
            counts as zero.
        spec: The base.
    """
    norms = [update.norm() for update in updates]
    factors = torch.tensor(
        [0.0 if n == 0.0 else 2.0 ** -math.frexp(n)[1] for n in norms], dtype=torch.float64
    )
    whole = np.zeros((len(updates), len(updates)))
    layered, size = np.zeros_like(whole), 0
    stacks = stacks_of(updates, spec)
    for stack in stacks:
        products = stack.products(factors).numpy()
        whole += products
        layered += stack.rows * stack.cols * np.maximum(_cosines(products), _equal_signs(stack, products))
        size += stack.rows * stack.cols
        stack.release()
    cosine = _cosines(whole)
    similarity = np.maximum(cosine, layered / max(1, size))
    mixed = _mixed_pairs([stack.name for stack in stacks], updates)
    if mixed.any():
        similarity = np.where(
            mixed, np.maximum(similarity, _values_against_signs(stacks, factors)), similarity
        )
    cosine = _as_if_dense(cosine, _forms(stacks, updates))
    return Comparison(np.asarray(np.round(similarity, _DIGITS)), np.asarray(np.round(cosine, _DIGITS)))


def leaders(alike: Matrix, order: Sequence[int], threshold: float) -> list[int]:
    """Find the leader of each update: the first similar one in order of arrival, or itself.

    A follower is never a leader, so a chain of similar updates does not connect two dissimilar ones.

    Args:
        alike: ``[n, n]`` similarities.
        order: Permutation of 0 to n - 1 by time of arrival, earliest first.
        threshold: Minimum similarity of a follower to its leader.
    """
    leader_of = list(range(len(order)))
    first: list[int] = []
    for update in order:
        leader = next((other for other in first if alike[update, other] >= threshold), None)
        if leader is None:
            first.append(update)
        else:
            leader_of[update] = leader
    return leader_of


def _cosines(products: Matrix) -> Matrix:
    norms = np.sqrt(np.maximum(products.diagonal(), 0.0))
    scale = np.outer(norms, norms)
    return np.asarray(np.divide(products, scale, out=np.zeros_like(products), where=scale > 0.0))


def _as_if_dense(cosine: Matrix, forms: NDArray[np.str_]) -> Matrix:
    """Estimate cosines of dense updates from those of sign deltas and sparse ones, for normal values.

    For normal pairs with correlation r, signs have cosine (2 / pi) asin r, values against signs r sqrt(2 / pi), and
    values against the largest 1/64 of them 0.346 r. Two sparse updates follow ``_CORRELATIONS``.
    """
    loss = np.array([_COSINE_WITH_DENSE.get(form, 1.0) for form in forms])
    alike = np.minimum(np.abs(cosine), 1.0)
    mixed = np.minimum(alike / np.outer(loss, loss), 1.0)
    estimate = np.where(forms[:, None] == forms[None], alike, mixed)
    for form, of_pair in (
        ("signs", np.sin(np.pi / 2 * alike)),
        ("sparse", np.interp(alike, _SPARSE_COSINES, _CORRELATIONS)),
    ):
        estimate = np.where(np.outer(forms == form, forms == form), of_pair, estimate)
    return np.asarray(np.sign(cosine) * estimate)


def _forms(stacks: Sequence[Stack], updates: Sequence[DeltaFile]) -> NDArray[np.str_]:
    """Return ``[n]`` names: ``signs`` or ``sparse`` if most weights of an update have that form, else empty."""
    names = list(_COSINE_WITH_DENSE)
    sizes, held = np.zeros((len(names), len(updates))), np.zeros(len(updates))
    for stack in stacks:
        for i, update in enumerate(updates):
            if stack.name in update:
                record, size = update.record(stack.name), stack.rows * stack.cols
                form = "sparse" if get_codec(record.codec).sparse else form_of(record).kind
                held[i] += size
                sizes[:, i] += [size * (name == form) for name in names]
    return np.select(list(2 * sizes > held), names, "")


def _equal_signs(stack: Stack, products: Matrix) -> Matrix:
    """Return the share of equal minus unequal signs; 0 if the stack has no packed signs or a tensor is zero."""
    if not isinstance(stack, SignStack):
        return np.zeros_like(products)
    ones = [torch.ones(1)] * len(stack.updates)
    held = products.diagonal() > 0.0
    agreed = sign_products(stack.bits, ones, stack.cols, None).numpy() / (stack.rows * stack.cols)
    return np.asarray(np.where(np.outer(held, held), agreed, 0.0))


def _mixed_pairs(names: Sequence[str], updates: Sequence[DeltaFile]) -> NDArray[np.bool_]:
    """Return an ``[n, n]`` mask of pairs that store some tensor in different codecs; all sign codecs count as one."""
    pairs = np.zeros((len(updates), len(updates)), dtype=bool)
    for name in names:
        kinds = np.array([_kind(update.record(name)) if name in update else "" for update in updates])
        pairs |= (kinds[:, None] != kinds[None]) & np.outer(kinds != "", kinds != "")
    return pairs


def _kind(record: TensorRecord) -> str:
    form = form_of(record)
    return form.kind if form.kind == "signs" else record.codec


def _values_against_signs(stacks: Sequence[Stack], factors: torch.Tensor) -> Matrix:
    """Return ``<u_i, sign u_j> / |u_i|_1``, or with i and j swapped, whichever is larger."""
    n = len(factors)
    agreed, total = np.zeros((n, n)), np.zeros((n, 1))
    for stack in stacks:
        held = _BlockStack(stack.name, stack.updates, stack.shape)
        held.add_agreement(factors, agreed, total)
        held.release()
    share = np.divide(agreed, total, out=np.zeros_like(agreed), where=total > 0.0)
    return np.asarray(np.maximum(share, share.T))


class _BlockStack(DecodedStack):
    """A tensor of all updates, decoded block by block from any codec."""

    def add_agreement(self, factors: torch.Tensor, agreed: Matrix, total: Matrix) -> None:
        """Add ``<u_i, sign u_j>`` to ``agreed`` ``[n, n]`` and ``|u_i|_1`` to ``total`` ``[n, 1]``."""
        for _, block in self._blocks():
            values = (block.to(torch.float64) * factors[:, None]).numpy()
            agreed += values @ np.sign(values).T
            total += np.abs(values).sum(axis=1, keepdims=True)

    def common(self) -> Matrix:
        """``[n, n]`` counts of weights that are nonzero in both updates of a pair."""
        counts = np.zeros((len(self.updates), len(self.updates)))
        for _, block in self._blocks():
            held = (block != 0.0).to(torch.float32)
            counts += (held @ held.T).to(torch.float64).numpy()
        return counts


def beyond(cosines: Matrix) -> Matrix:
    """Return the ``[n, n]`` excess of pairs over the background similarity: 1 for equal updates, 0 at the background.

    The background of a pair is the median cosine of all pairs or, if larger, the median cosine of either update with
    all others. Unrelated noise in a third of the updates lowers the former; only noise in half of them lowers the
    latter.

    Args:
        cosines: ``[n, n]`` cosines of the entire updates.
    """
    if len(cosines) < 2:
        return np.asarray(cosines)
    background = np.clip(_background(cosines), 0.0, 1.0 - 1e-6)
    return np.asarray((cosines - background) / (1.0 - background))


def same_source(cosines: Matrix) -> NDArray[np.bool_]:
    """Return an ``[n, n]`` mask of pairs of contributors that appear to train on the same data.

    The cosine of a contributor's updates in two rounds is their reliability: chance, such as the order of the rows or
    added noise, lowers it. Spearman's correction for attenuation (1904) removes chance from the cosine of a pair:
    ``r_ij = sqrt(c_ij c_ji / (c_ii c_jj))`` is about 1 for the same data. A pair is in the mask if r is near 1, at
    least halfway from the round's background to 1, and outside the spread of the round. With fewer than 9 known values
    the mask is empty.

    Args:
        cosines: ``[n, n]`` cosines of update i with the previous update of the author of update j; NaN without one.
    """
    own = np.clip(cosines.diagonal(), 1e-9, None)
    both = np.clip(cosines, 0.0, None)
    corrected = np.sqrt(both * both.T / np.outer(own, own))
    if np.count_nonzero(~np.isnan(corrected)) < 9:  # a single pair is its own background
        return np.zeros(cosines.shape, dtype=bool)
    background = _background(corrected)
    excess = corrected - background
    pairs = _off_diagonal(corrected)
    clear = excess > _BEYOND_SPREAD * np.nanmedian(np.abs(pairs - np.nanmedian(pairs)))
    near_one = (corrected >= _SAME_DATA) & (corrected <= 1.0 / _SAME_DATA)
    return np.asarray(clear & near_one & (excess >= (1.0 - background) / 2))


def _background(cosines: Matrix) -> Matrix:
    """Return the ``[n, n]`` median cosine of all pairs, at least that of either update with all others."""
    own = np.array([_median_low(np.delete(row, i)) for i, row in enumerate(cosines)])
    return np.asarray(np.fmax(_median_low(_off_diagonal(cosines)), np.fmax.outer(own, own)))


def _off_diagonal(matrix: Matrix) -> Matrix:
    return np.asarray(matrix[~np.eye(len(matrix), dtype=bool)])


def _median_low(values: Matrix) -> float:
    known = values[~np.isnan(values)].tolist()
    return statistics.median_low(known) if known else math.nan


def groups_of(links: Matrix, threshold: float) -> list[list[int]]:
    """Group contributors to be paid as one, by average linkage (Sokal and Michener 1958).

    The closest groups are joined first, while the mean of their pairs' links reaches the threshold. Therefore one pair
    with a low value by chance does not split a group, and a contributor linked to only one member does not join it.

    Args:
        links: ``[n, n]`` strengths of the links between two contributors.
        threshold: Minimum mean strength of the links between two groups.
    """
    groups = {i: [i] for i in range(len(links))}
    mean = np.where(np.tri(len(links), k=-1, dtype=bool), links, -np.inf)  # [a, b] of groups with a > b
    while len(groups) > 1:
        a, b = map(int, np.unravel_index(mean.argmax(), mean.shape))
        if not mean[a, b] >= threshold - _ROUNDING:
            break
        share = len(groups[a]) / (len(groups[a]) + len(groups[b]))
        to_a, to_b = (np.fmax(mean[k], mean[:, k]) for k in (a, b))
        groups[b] = sorted(groups[b] + groups.pop(a))
        joined = share * to_a + (1.0 - share) * to_b
        mean[b, :b], mean[b + 1 :, b] = joined[:b], joined[b + 1 :]
        mean[a], mean[:, a] = -np.inf, -np.inf
    return list(groups.values())


def torn_apart(updates: Sequence[DeltaFile], spec: BaseSpec) -> NDArray[np.bool_]:
    """Return an ``[n, n]`` mask of sparse pairs that have almost no nonzero weight in common.

    The mask contains pairs with less than a tenth of the overlap expected by chance at their densities: independent
    sparse updates overlap more.

    Args:
        updates: Open deltas of models shaped like ``spec``.
        spec: The base.
    """
    n = len(updates)
    common, size = np.zeros((n, n)), 0
    for stack in stacks_of(updates, spec):
        common += _common(stack)
        size += stack.rows * stack.cols
        stack.release()
    density = common.diagonal() / max(1, size)
    sparse = (density > 0.0) & (density < _DENSE)
    chance = size * np.outer(density, density)
    apart = np.outer(sparse, sparse) & (chance >= _MIN_BY_CHANCE) & (common < _OF_CHANCE * chance)
    return np.asarray(apart & ~np.eye(n, dtype=bool))


def _common(stack: Stack) -> Matrix:
    """``[n, n]`` counts of weights that are nonzero in both updates of a pair."""
    if isinstance(stack, SignStack):
        held = torch.stack([scales.reshape(-1) != 0 for scales in stack.scales]).to(torch.float64)
        return np.asarray((held @ held.T).numpy() * (stack.rows * stack.cols / held.shape[1]))
    if isinstance(stack, FactorStack):
        rows, cols = torch.zeros(len(stack.updates), stack.rows), torch.zeros(len(stack.updates), stack.cols)
        for i, factors in enumerate(stack.factors):
            if factors is not None:
                rows[i], cols[i] = (factors.b != 0).any(1), (factors.a != 0).any(0)
        return np.asarray(((rows @ rows.T) * (cols @ cols.T)).to(torch.float64).numpy())
    return _BlockStack(stack.name, stack.updates, stack.shape).common()
