"""Sample the next token of every row of a step; rows with the same settings are sampled together.

Presence and frequency penalties and the bias are OpenAI's: they are added to the logits before the temperature, and the
penalties count only tokens of the answer.

Sampling is an exponential race (Gumbel 1954; Maddison et al. 2014, "A* sampling", section 2): the token with the
smallest ``exponential noise / probability`` wins. Blocks of 128 adjacent tokens race first, then the tokens of the
winning block. The noise comes from the row's own generator. Each number belongs to a block, or to a position in a
block, whichever tokens top-k or top-p exclude. Rounding with a different batch size therefore changes a draw only if
two candidates are almost equal, a few times in a million draws. Sampling by a cumulative sum over the vocabulary would
depend on every probability before the token.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.request import SamplingParams

_MIN_TEMPERATURE = 1e-4
"""Temperatures below this are treated as 0 (greedy), since dividing by them would overflow."""

_BLOCK = 128
_SMALLEST_NOISE = 1e-300
"""Minimum noise; above 0, so that a token of probability 0 never wins."""


class RowSampler:
    """The sampler of one request: its parameters, random numbers, and tokens so far."""

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], end_ids: Collection[int] = ()
    ) -> None:
        self.greedy = params.temperature < _MIN_TEMPERATURE
        self.settings = (float(params.temperature), params.top_k, float(params.top_p), float(params.min_p))
        self.logprobs = params.logprobs
        self._params = params
        self._penalised = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._repetition = params.repetition_penalty != 1.0
        self._counts: Counter[int] = Counter()
        self._seen = dict.fromkeys(prompt_ids) if self._repetition else {}
        self._added: np.ndarray[Any, np.dtype[np.float32]] | None = None
        self._generator: torch.Generator | None = None
        if not self.greedy:
            seed = secrets.randbits(63) if params.seed is None else params.seed % 2**63
            self._generator = torch.Generator().manual_seed(seed)
        self._ends, self._tokens_before_end = list(end_ids), params.min_tokens
        self.shaped = self._penalised or self._repetition or bool(params.logit_bias or params.min_tokens)

    def shape(self, scores: Tensor) -> None:
        """Apply penalties and bias in place to ``[vocab] float32``."""
        if self._repetition:
            ids = torch.tensor(list(self._seen), dtype=torch.int64, device=scores.device)
            scores.copy_(repetition_penalty(self._params.repetition_penalty, ids, scores))
        if self._penalised or self._params.logit_bias:
            if self._added is None:
                self._added = np.zeros(scores.shape[0], dtype=np.float32)
                for token_id, bias in self._params.logit_bias.items():
                    self._added[token_id] = bias
            scores.add_(torch.from_numpy(self._added).to(scores.device))
        if self._tokens_before_end > 0:
            scores[self._ends] = -math.inf

    def noise(self, size: int) -> Tensor:
        """Return the next exponential random numbers, ``[size] float64``."""
        drawn = torch.rand(size, generator=self._generator, dtype=torch.float64)
        return drawn.neg_().log1p_().neg_().clamp_(min=_SMALLEST_NOISE)

    def push(self, token_id: int) -> None:
        """Record the sampled token."""
        self._tokens_before_end -= 1
        if self._penalised and self._added is not None:
            params = self._params
            self._counts[token_id] += 1
            penalty = params.presence_penalty + params.frequency_penalty * self._counts[token_id]
            self._added[token_id] = params.logit_bias.get(token_id, 0.0) - penalty
        if self._repetition:
            self._seen[token_id] = None


@dataclass(frozen=True)
class Row:
    """One row of logits: its sampler, and the tokens that its guide bans (``[vocab] bool``), if any."""

    sampler: RowSampler
    banned: np.ndarray[Any, np.dtype[np.bool_]] | None = None


class SampledLogprob(NamedTuple):
    """The log-probability of a sampled token, and the most likely tokens at its position, most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SampledToken:
    """A row's next token, or the error that replaces it."""

    token_id: int
    logprob: SampledLogprob | None = None
    error: GymError | None = None


def choose(logits: Tensor, rows: Sequence[Row]) -> list[SampledToken]:
    """Sample one token per row.

    Args:
        logits: ``[rows, vocab] float32``; not modified.
        rows: The sampler of each row of logits.
    """
    ids, peaks = _best(logits)
    errors: dict[int, GymError] = {
        number: _not_numbers(peak) for number, peak in enumerate(peaks) if not math.isfinite(peak)
    }
    special = [
        number
        for number, row in enumerate(rows)
        if number not in errors and (row.sampler.shaped or row.banned is not None or not row.sampler.greedy)
    ]
    if special:
        _sample_special_rows(logits, rows, special, ids, errors)
    reported = [
        number for number, row in enumerate(rows) if row.sampler.logprobs is not None and number not in errors
    ]
    logprobs = _logprobs(logits, rows, reported, ids) if reported else {}
    return [
        SampledToken(token_id, logprobs.get(number), errors.get(number))
        for number, token_id in enumerate(ids)
    ]


def _sample_special_rows(
    logits: Tensor, rows: Sequence[Row], special: list[int], ids: list[int], errors: dict[int, GymError]
) -> None:
    """Fill in the ``ids`` of rows that are shaped, masked or sampled."""
    scores = logits if len(special) == len(rows) else logits[special]
    changed = [
        place
        for place, number in enumerate(special)
        if rows[number].sampler.shaped or rows[number].banned is not None
    ]
    if changed:
        scores = scores.clone() if scores is logits else scores
        for place in changed:
            row = rows[special[place]]
            row.sampler.shape(scores[place])
            if row.banned is not None:
                scores[place].masked_fill_(torch.from_numpy(row.banned).to(scores.device), -math.inf)
        likeliest, peaks = _best(scores)
        for number, token_id, peak in zip(special, likeliest, peaks, strict=True):
            ids[number] = token_id
            if not math.isfinite(peak):
                errors[number] = _no_token_left()
    groups: dict[tuple[float, int, float, float], list[int]] = defaultdict(list)
    for place, number in enumerate(special):
        if not rows[number].sampler.greedy and number not in errors:
            groups[rows[number].sampler.settings].append(place)
    for settings, places in groups.items():
        group = scores if len(places) == len(special) else scores[places]
        for warper in warpers(settings):
            group = warper(group)
        size = noise_size(group.shape[1])
        noise = torch.stack([rows[special[place]].sampler.noise(size) for place in places])
        for place, token_id in zip(places, _draw(group, noise.to(group.device)), strict=True):
            ids[special[place]] = token_id


def _best(logits: Tensor) -> tuple[list[int], list[float]]:
    """Return each row's most likely token (the first on a tie) and its logit, which is NaN if any logit is."""
    if logits.device.type == "cpu":  # numpy's argmax is ten times faster than torch's
        array = logits.numpy()
        places = array.argmax(axis=-1)
        return places.tolist(), array[np.arange(len(array)), places].tolist()
    return _best_by_torch(logits)


def _best_by_torch(logits: Tensor) -> tuple[list[int], list[float]]:
    """Compute ``_best`` on any device, since torch's argmax on CUDA may return any of several equal maxima."""
    values = logits.amax(dim=-1)
    hits = (logits == values[:, None]) | logits.isnan()
    places = torch.arange(logits.shape[1], device=logits.device)
    best = torch.where(hits, places, logits.shape[1]).amin(dim=-1)
    return best.tolist(), values.tolist()


def noise_size(vocabulary: int) -> int:
    """Return the number of random numbers that one draw needs."""
    return -(-vocabulary // _BLOCK) + _BLOCK


def _draw(scores: Tensor, noise: Tensor) -> list[int]:
    """Draw one token per row: the winner of the race of blocks, then of the race in its block.

    Args:
        scores: ``[rows, vocab] float32``; -inf for excluded tokens.
        noise: ``[rows, noise_size(vocab)] float64``, exponential: for the blocks, then for the positions in a block.
    """
    probabilities = torch.softmax(scores, dim=-1)
    blocks = functional.pad(probabilities, (0, -probabilities.shape[1] % _BLOCK)).view(
        len(probabilities), -1, _BLOCK
    )
    first = noise[:, : blocks.shape[1]] / blocks.sum(dim=-1)
    block = first.argmin(dim=-1)
    within = noise[:, blocks.shape[1] :] / blocks[torch.arange(len(blocks), device=blocks.device), block]
    drawn: list[int] = (block * _BLOCK + within.argmin(dim=-1)).tolist()
    return drawn


def _logprobs(
    logits: Tensor, rows: Sequence[Row], reported: list[int], ids: list[int]
) -> dict[int, SampledLogprob]:
    logprobs = torch.log_softmax(logits[reported].float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor([[ids[number]] for number in reported], device=logits.device))
    most = max(rows[number].sampler.logprobs or 0 for number in reported)
    values, places = logprobs.topk(min(most, logprobs.shape[1]), dim=-1)
    by_row: dict[int, SampledLogprob] = {}
    lists = zip(reported, chosen.flatten().tolist(), values.tolist(), places.tolist(), strict=True)
    for number, own, top_values, top_ids in lists:
        count = rows[number].sampler.logprobs or 0
        top = zip(top_ids[:count], top_values[:count], strict=True)
        by_row[number] = SampledLogprob(own, tuple(top))
    return by_row


def _not_numbers(peak: float) -> GymError:
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"the model's logits are not finite (the largest is {peak})",
        "its weights, or the variant's, are broken: try the base without a variant",
    )


def _no_token_left() -> GymError:
    return GymError(
        ErrorCode.DATA_INVALID,
        "no token is left to choose: the JSON schema or the logit_bias excludes all of them",
    )


_NUCLEUS = 256
"""Number of most likely tokens among which the nucleus is searched first."""


Warper = Callable[[Tensor], Tensor]
"""A function from ``scores [rows, vocab]`` to new scores."""


@lru_cache(maxsize=256)
def warpers(settings: tuple[float, int, float, float]) -> tuple[Warper, ...]:
    """Return the warpers for temperature, top-k, top-p and min-p, in transformers' order."""
    temperature, top_k, top_p, min_p = settings
    chosen: list[Warper] = []
    if temperature != 1.0:
        chosen.append(lambda scores: scores / temperature)
    if top_k:
        chosen.append(partial(_top_k, top_k))
    if top_p < 1.0:
        chosen.append(partial(_top_p, top_p))
    if min_p > 0.0:
        chosen.append(partial(_min_p, min_p))
    return tuple(chosen)


def repetition_penalty(penalty: float, ids: Tensor, scores: Tensor) -> Tensor:
    """Apply the penalty of Keskar et al. 2019, section 4.1, to ``scores [vocab]``, once for each id in ``[seen]``."""
    ids = ids[ids < len(scores)]  # an embedding may have more rows than the head
    seen = scores[ids]
    return scores.index_copy(0, ids, torch.where(seen < 0, seen * penalty, seen / penalty))


def _top_k(top_k: int, scores: Tensor) -> Tensor:
    least = scores.topk(min(top_k, scores.shape[1]), dim=-1).values[:, -1:]
    return scores.masked_fill(scores < least, -math.inf)


def _top_p(top_p: float, scores: Tensor) -> Tensor:
    """Keep the nucleus (Holtzman et al. 2020), without sorting the vocabulary if the nucleus is small."""
    if scores.shape[1] <= _NUCLEUS:
        return _top_p_of_all(top_p, scores)
    values, places = scores.topk(_NUCLEUS, dim=-1)
    sums = (values - scores.logsumexp(dim=-1, keepdim=True)).exp().cumsum(dim=-1)
    large = sums[:, -1] < top_p
    if bool(large.any()):
        masked = scores.clone()
        masked[large] = _top_p_of_all(top_p, scores[large])
        if not bool(large.all()):
            masked[~large] = _top_p(top_p, scores[~large])
        return masked
    # A token is kept if the tokens before it have a total probability below top_p.
    values[:, 1:].masked_fill_(sums[:, :-1] >= top_p, -math.inf)
    return torch.full_like(scores, -math.inf).scatter_(1, places, values)


def _top_p_of_all(top_p: float, scores: Tensor) -> Tensor:
    """Keep the nucleus, by sums over the sorted vocabulary; the most likely token always stays."""
    values, places = scores.sort(dim=-1)
    gone = values.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    gone[:, -1] = False
    return scores.masked_fill(torch.zeros_like(gone).scatter_(1, places, gone), -math.inf)


def _min_p(min_p: float, scores: Tensor) -> Tensor:
    """Keep the same tokens as transformers' ``MinPLogitsWarper``, without sorting the vocabulary."""
    return scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + math.log(min_p), -math.inf)
