"""ARC, adaptive robust clipping: clip the largest norms to the next one.

Allouah et al. 2024, "The Vital Role of Gradient Clipping in Byzantine-Resilient Distributed Learning" (arXiv
2405.14432), algorithm 2: the k = floor(2 (f / n) (n - f)) updates of largest norm are scaled to the (k + 1)-th
largest. It preserves an aggregator's robustness and, unlike a fixed bound, adapts as updates shrink. k is at least
f, and below n / 2 for n >= 2f + 1, so the largest remaining norm is at most the largest honest one. k is computed in
integers; ByzFL 0.0.11 rounds a float down, which may clip one fewer.
"""

from __future__ import annotations

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.soup.gram import CombinationWeights, GramMatrix, Needs
from gym_fed.soup.pre_aggregator import PreAggregator
from gym_fed.soup.pre_aggregators.norm_cap import capped


class ARC(PreAggregator):
    name = "arc"
    needs = Needs.NORMS

    def rows(self, count: int) -> int:
        """Return ``count``; refuse rounds without an honest majority."""
        needed = 2 * self.num_malicious_nodes + 1
        if count < needed:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"{counted(count, 'update', 'are')} too few for pre-aggregator 'arc' to withstand num_malicious_nodes: "
                f"{self.num_malicious_nodes}, which needs {needed}",
                "wait for more contributors, or lower num_malicious_nodes",
            )
        return count

    def mix(self, gram: GramMatrix) -> CombinationWeights:
        count, malicious = self.rows(gram.count), self.num_malicious_nodes
        clipped = 2 * malicious * (count - malicious) // count
        norms = gram.norms()
        return CombinationWeights.scaled(
            capped(norms, float(norms.sort(descending=True).values[clipped])), gram.weights
        )
