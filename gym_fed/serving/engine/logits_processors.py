"""Logits processors for the scores of a step: what transformers' compute, without its import and most of its sorts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

_NUCLEUS = 256
"""Likeliest tokens among which a nucleus is looked for first."""


Warper = Callable[[Tensor], Tensor]
"""Takes ``scores [rows, vocab]``, and returns others."""


@lru_cache(maxsize=256)
def warpers(settings: tuple[float, int, float, float]) -> tuple[Warper, ...]:
    """Of temperature, top-k, top-p and min-p, in transformers' order."""
    temperature, top_k, top_p, min_p = settings
    wanted: list[Warper] = []
    if temperature != 1.0:
        wanted.append(partial(_divided, temperature))
    if top_k:
        wanted.append(partial(_top_k, top_k))
    if top_p < 1.0:
        wanted.append(partial(_top_p, top_p))
    if min_p > 0.0:
        wanted.append(partial(_min_p, min_p))
    return tuple(wanted)


def repetition_penalty(penalty: float, ids: Tensor, scores: Tensor) -> Tensor:
    """The penalty of Keskar et al. 2019, section 4.1, on ``scores [vocab]`` of token ids ``[seen]``, each once."""
    ids = ids[ids < len(scores)]  # an embedding may have more rows than the head
    found = scores[ids]
    return scores.index_copy(0, ids, torch.where(found < 0, found * penalty, found / penalty))


def _divided(temperature: float, scores: Tensor) -> Tensor:
    return scores / temperature


def _top_k(top_k: int, scores: Tensor) -> Tensor:
    least = scores.topk(min(top_k, scores.shape[1]), dim=-1).values[:, -1:]
    return scores.masked_fill(scores < least, -math.inf)


def _top_p(top_p: float, scores: Tensor) -> Tensor:
    """Nucleus sampling (Holtzman et al. 2020); the vocabulary is not sorted where the nucleus is small."""
    if scores.shape[1] <= _NUCLEUS:
        return _top_p_of_all(top_p, scores)
    values, places = scores.topk(_NUCLEUS, dim=-1)
    sums = (values - scores.logsumexp(dim=-1, keepdim=True)).exp().cumsum(dim=-1)
    large = sums[:, -1] < top_p
    if bool(large.any()):
        kept = scores.clone()
        kept[large] = _top_p_of_all(top_p, scores[large])
        if not bool(large.all()):
            kept[~large] = _top_p(top_p, scores[~large])
        return kept
    # A token stays if those before it do not make up top_p yet.
    values[:, 1:].masked_fill_(sums[:, :-1] >= top_p, -math.inf)
    return torch.full_like(scores, -math.inf).scatter_(1, places, values)


def _top_p_of_all(top_p: float, scores: Tensor) -> Tensor:
    """By the sums of the least likely tokens; the likeliest stays, whatever they are."""
    values, places = scores.sort(dim=-1)
    gone = values.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    gone[:, -1] = False
    return scores.masked_fill(torch.zeros_like(gone).scatter_(1, places, gone), -math.inf)


def _min_p(min_p: float, scores: Tensor) -> Tensor:
    """As transformers' ``MinPLogitsWarper``, which sorts the vocabulary for it."""
    return scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + math.log(min_p), -math.inf)
