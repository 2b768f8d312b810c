"""Bucketing: average updates in small random buckets.

Karimireddy et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", algorithm 1 (as in its
published form: a permutation cut into buckets of s, without resampling). Averages differ less than updates. The price
is that a malicious client affects an entire bucket: f of them need ceil(n / s) >= 2f + 1. A bucket is the weighted mean
of its updates, with the sum of their weights; the last bucket may be smaller.

The permutation is a function of only ``seed`` and n: contributors in the order of sha256("seed:n:index"). A round can
therefore be replayed from its recipe in any language. Each round needs its own seed (``SoupRecipe.for_round`` adds the
round's number), since otherwise the same positions would share a bucket every time. A hub orders updates by their
digests: a contributor can choose its own digest, but knows no others before the round is closed.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated

from pydantic import Field

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import torch
from gym_fed.core.text import counted
from gym_fed.soup.gram import CombinationWeights, GramMatrix
from gym_fed.soup.pre_aggregator import PreAggregator
from gym_fed.soup.rule import RuleConfig


class BucketingConfig(RuleConfig):
    bucket_size: Annotated[int, Field(ge=1)] = 2
    """Number of updates per bucket, s."""

    seed: int = 0
    """Seed of the permutation."""


class Bucketing(PreAggregator):
    name = "bucketing"
    draws_lots = True
    Config = BucketingConfig
    config: BucketingConfig

    def rows(self, count: int) -> int:
        """Return the number of buckets; refuse a round in which malicious clients could affect half of them."""
        buckets, needed = -(-count // self.config.bucket_size), 2 * self.num_malicious_nodes + 1
        if buckets < needed:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"{counted(count, 'update', 'make')} {counted(buckets, 'bucket')} of {self.config.bucket_size}; "
                f"num_malicious_nodes: {self.num_malicious_nodes} needs {needed} buckets, or "
                f"{counted((needed - 1) * self.config.bucket_size + 1, 'update')}",
                "wait for more contributors, or lower bucket_size",
            )
        return buckets

    def mix(self, gram: GramMatrix) -> CombinationWeights:
        count, size = gram.count, self.config.bucket_size
        matrix = torch.zeros(self.rows(count), count, dtype=torch.float64)
        totals = []
        order = _shuffled(count, self.config.seed)
        for row, start in zip(matrix, range(0, count, size), strict=True):
            bucket = sorted(order[start : start + size])
            totals.append(math.fsum(gram.weights[bucket].tolist()))
            row[bucket] = gram.weights[bucket] / totals[-1]
        return CombinationWeights(matrix, torch.tensor(totals, dtype=torch.float64))


def _shuffled(count: int, seed: int) -> list[int]:
    return sorted(range(count), key=lambda index: hashlib.sha256(f"{seed}:{count}:{index}".encode()).digest())
