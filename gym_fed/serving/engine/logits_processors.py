"""transformers' logits processors for the scores of a step, without the sorts that two of them do."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

_NUCLEUS = 256
"""Likeliest tokens among which a nucleus is looked for first."""


@lru_cache(maxsize=256)
def warpers(settings: tuple[float, int, float, float]) -> tuple[Any, ...]:
    """Of temperature, top-k, top-p and min-p: each takes None and ``scores [rows, vocab]``, in transformers' order."""
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

    temperature, top_k, top_p, min_p = settings
    wanted: list[Any] = []
    if temperature != 1.0:
        wanted.append(TemperatureLogitsWarper(temperature))
    if top_k:
        wanted.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        wanted.append(_TopP(top_p))
    if min_p > 0.0:
        wanted.append(partial(_min_p, min_p))
    return tuple(wanted)


class _TopP:
    """transformers' ``TopPLogitsWarper``, without its sort of the vocabulary where the nucleus is small."""

    def __init__(self, top_p: float) -> None:
        from transformers.generation.logits_process import TopPLogitsWarper

        self._top_p = top_p
        self._whole = TopPLogitsWarper(top_p)

    def __call__(self, _ids: None, scores: Tensor) -> Tensor:
        if scores.shape[1] <= _NUCLEUS:
            return cast("Tensor", self._whole(None, scores))
        values, places = scores.topk(_NUCLEUS, dim=-1)
        sums = (values - scores.logsumexp(dim=-1, keepdim=True)).exp().cumsum(dim=-1)
        if bool((sums[:, -1] < self._top_p).any()):
            large = sums[:, -1] < self._top_p
            kept = scores.clone()
            kept[large] = self._whole(None, scores[large])
            if not bool(large.all()):
                kept[~large] = self(None, scores[~large])
            return kept
        # A token stays if those before it do not make up top_p yet.
        values[:, 1:].masked_fill_(sums[:, :-1] >= self._top_p, -math.inf)
        return torch.full_like(scores, -math.inf).scatter_(1, places, values)


def _min_p(min_p: float, _ids: None, scores: Tensor) -> Tensor:
    """As transformers' ``MinPLogitsWarper``, which sorts the vocabulary for it."""
    return scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + math.log(min_p), -math.inf)


@lru_cache(maxsize=256)
def repetition_penalty(penalty: float) -> Any:
    """It takes token ids ``[rows, seen]`` and ``scores [rows, vocab]``."""
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    return RepetitionPenaltyLogitsProcessor(float(penalty))
