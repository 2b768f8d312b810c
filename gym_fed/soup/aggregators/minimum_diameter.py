"""Minimum diameter averaging (MDA): the mean of the n - f updates with the smallest diameter.

El Mhamdi et al. 2018, "The Hidden Vulnerability of Distributed Learning in Byzantium" (Brute), after Rousseeuw 1985,
"Multivariate estimation with high breakdown point". It tolerates f malicious clients out of n >= 2f + 1: the result is
within 2f / (n - f) of the honest updates' diameter from their mean (Farhadkhani et al. 2022, "Byzantine Machine
Learning Made Easy by Resilient Averaging of Momentums", table 1).

The search is exact. n - f updates have a diameter below t exactly when f updates cover every pair farther apart than t.
A vertex cover of at most f is found in about 1.47^f steps (Chen et al. 2001, "Vertex Cover: Further Observations and
Further Improvements", whose first reductions are used). Trying all subsets, as ByzFL does, takes C(n, f) steps. If
several subsets have the smallest diameter, the next largest distance decides, and so on: the result does not depend on
the order of contributors unless distances are equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import torch
from gym_fed.soup.aggregator import WeightRule
from gym_fed.soup.gram import GramMatrix

if TYPE_CHECKING:
    from torch import Tensor

MAX_MALICIOUS = 20
"""Maximum f; the search grows exponentially with f."""


class MinimumDiameter(WeightRule):
    name = "minimum_diameter"
    robust = True

    def check(self, weights: Tensor) -> None:
        """Also refuse a search that is too large to finish."""
        if self.num_malicious_nodes > MAX_MALICIOUS:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"aggregator {self.name!r} searches exactly and supports num_malicious_nodes up to {MAX_MALICIOUS}, "
                f"not {self.num_malicious_nodes}",
                "choose multi_krum, geometric_median or caf, or lower num_malicious_nodes",
            )
        super().check(weights)

    def weigh(self, gram: GramMatrix) -> Tensor:
        selected = _closest_together(gram.squared_distances(), self.num_malicious_nodes)
        coefficients = torch.zeros(gram.count, dtype=torch.float64)
        coefficients[selected] = 1.0 / len(selected)
        return coefficients


def _closest_together(squared_distances: Tensor, malicious: int) -> list[int]:
    """Return the ascending indices of the n - f updates with the smallest diameter."""
    count = len(squared_distances)
    conflicts = Conflicts(malicious)
    if malicious:
        upper = torch.triu_indices(count, count, offset=1)
        farthest = squared_distances[upper[0], upper[1]].sort(descending=True, stable=True).indices
        for first, second in upper[:, farthest].T.tolist():
            if not conflicts.part(first, second) and conflicts.decided:
                break
    omitted = conflicts.omitted
    return [index for index in range(count) if index not in omitted]


class Conflicts:
    """A growing conflict graph of which at most ``limit`` vertices may be omitted (vertex cover by bounded search).

    Args:
        limit: Maximum number of omissions; the time grows at most like 1.47^limit.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._edges: dict[int, int] = {}  # from a vertex to the bit mask of its neighbours
        self._stays = 0
        self._cover = 0  # one set of omissions that resolves all conflicts so far

    def part(self, first: int, second: int) -> bool:
        """Add a conflict and return True if the graph stays resolvable; otherwise ignore it: both vertices are kept."""
        pair = 1 << first | 1 << second
        if pair & self._stays == pair:
            return False
        edges = dict(self._edges)
        edges[first] = edges.get(first, 0) | 1 << second
        edges[second] = edges.get(second, 0) | 1 << first
        cover: int | None = self._cover
        if not pair & self._cover:
            cover = _cover(edges, self._stays, self._limit)
        if cover is None:  # no cover of the others contains either vertex, so the current one stays valid
            self._stays |= pair
            return False
        self._edges, self._cover = edges, cover
        return True

    @property
    def decided(self) -> bool:
        """True if only one cover is left."""
        forced = 0
        for vertex, neighbours in self._edges.items():
            if self._stays >> vertex & 1:
                forced |= neighbours
            elif neighbours.bit_count() > self._limit:
                forced |= 1 << vertex
        return forced.bit_count() == self._limit

    @property
    def omitted(self) -> set[int]:
        """Vertices whose omission resolves all conflicts so far, at most ``limit``."""
        return {vertex for vertex in range(self._cover.bit_length()) if self._cover >> vertex & 1}


def _cover(edges: dict[int, int], stays: int, limit: int) -> int | None:
    """Return a vertex cover of at most ``limit`` vertices outside ``stays``, as a bit mask; None if there is none."""
    forced = 0
    while edges:
        room = limit - forced.bit_count()
        degrees = [neighbours.bit_count() for neighbours in edges.values()]
        if room <= 0 or sum(degrees) > 2 * room * max(degrees):
            return None
        certain = _certain(edges, stays, room)
        if certain is None:
            return forced | rest if (rest := _branch(edges, stays, room)) is not None else None
        if certain & stays:
            return None
        forced |= certain
        edges = _without(edges, certain)
    return forced if forced.bit_count() <= limit else None


def _certain(edges: dict[int, int], stays: int, room: int) -> int | None:
    """Return vertices that belong to a smallest cover if a cover of size ``room`` exists; None if that is undecided."""
    for vertex, neighbours in edges.items():
        if stays >> vertex & 1:
            return neighbours
        degree = neighbours.bit_count()
        if degree > room:
            return 1 << vertex
        if degree == 1:
            return 1 << vertex if neighbours & stays else neighbours
    return None


def _branch(edges: dict[int, int], stays: int, room: int) -> int | None:
    """Branch: either the vertex with most neighbours is in the cover, or all its neighbours are."""
    vertex = max(edges, key=lambda v: edges[v].bit_count())
    for side in (1 << vertex, edges[vertex]):
        if side.bit_count() <= room and not side & stays:
            rest = _cover(_without(edges, side), stays, room - side.bit_count())
            if rest is not None:
                return side | rest
    return None


def _without(edges: dict[int, int], taken: int) -> dict[int, int]:
    return {
        vertex: rest
        for vertex, neighbours in edges.items()
        if not taken >> vertex & 1 and (rest := neighbours & ~taken)
    }
