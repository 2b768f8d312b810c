"""From logits to tokens, all rows of a step together: as much in one operation as the rows have in common.

Temperature, top-k, top-p, min-p and the repetition penalty are transformers' logits processors, in its order; presence
and frequency penalties and the bias are OpenAI's (added to the logits before the temperature, for tokens of the answer
only). A row draws by inverting its distribution's cumulative sum at one uniform number of its own generator, so what a
seed gives does not depend on who else is in the batch.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.request import SamplingParams, TokenLogprob

_COLDEST = 1e-4
"""Temperatures below this are greedy: the limit, without its overflows."""

_DRAWN_AT_ONCE = 32
_LARGEST_UNIFORM = 1.0 - 2.0**-40


class RowSampler:
    """How one request chooses: its parameters, its random numbers, and what it has written so far."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self.greedy = params.temperature < _COLDEST
        self.settings = (float(params.temperature), params.top_k, float(params.top_p), float(params.min_p))
        self.logprobs = params.logprobs
        self._params = params
        self._penalised = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._repetition = params.repetition_penalty != 1.0
        self._counts: Counter[int] = Counter()
        self._seen = dict.fromkeys(prompt_ids) if self._repetition else {}
        self._added: np.ndarray[Any, np.dtype[np.float32]] | None = None
        self._generator: torch.Generator | None = None
        self._uniforms: list[float] = []
        if not self.greedy:
            seed = secrets.randbits(63) if params.seed is None else params.seed % 2**63
            self._generator = torch.Generator().manual_seed(seed)
        self.shaped = self._penalised or self._repetition or bool(params.logit_bias)

    def shape(self, scores: Tensor) -> None:
        """Penalties and bias, in place, on ``[vocab] float32``."""
        if self._repetition:
            ids = torch.tensor([list(self._seen)], device=scores.device)
            scores.copy_(_repetition_penalty(self._params.repetition_penalty)(ids, scores[None])[0])
        if self._penalised or self._params.logit_bias:
            if self._added is None:
                self._added = np.zeros(scores.shape[0], dtype=np.float32)
                for token_id, bias in self._params.logit_bias.items():
                    self._added[token_id] = bias
            scores.add_(torch.from_numpy(self._added).to(scores.device))

    def uniform(self) -> float:
        """The next random number in [0, 1)."""
        if not self._uniforms:
            drawn = torch.rand(_DRAWN_AT_ONCE, generator=self._generator, dtype=torch.float64)
            self._uniforms = drawn.flip(0).tolist()
        return min(self._uniforms.pop(), _LARGEST_UNIFORM)

    def push(self, token_id: int) -> None:
        """This token was chosen."""
        if self._penalised and self._added is not None:
            params = self._params
            self._counts[token_id] += 1
            penalty = params.presence_penalty + params.frequency_penalty * self._counts[token_id]
            self._added[token_id] = params.logit_bias.get(token_id, 0.0) - penalty
        if self._repetition:
            self._seen[token_id] = None


@dataclass(frozen=True)
class Row:
    """One row of logits: who chooses, and what a guide allows (``[vocab] bool``), if it has one."""

    sampler: RowSampler
    allowed: np.ndarray[Any, np.dtype[np.bool_]] | None = None


@dataclass(frozen=True)
class Choice:
    """The token, or why there is none."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: GymError | None = None


def choose(logits: Tensor, rows: Sequence[Row], token_text: Callable[[int], str]) -> list[Choice]:
    """One token a row.

    Args:
        logits: ``[rows, vocab] float32``; left as they are.
        rows: In the same order.
        token_text: For the texts of logprobs.
    """
    values, best = logits.max(dim=-1)
    ids, peaks = best.tolist(), values.tolist()
    errors: dict[int, GymError] = {
        number: _not_numbers(peak) for number, peak in enumerate(peaks) if not math.isfinite(peak)
    }
    special = [
        number
        for number, row in enumerate(rows)
        if number not in errors and (row.sampler.shaped or row.allowed is not None or not row.sampler.greedy)
    ]
    if special:
        _choose_specially(logits, rows, special, ids, errors)
    told = [
        number for number, row in enumerate(rows) if row.sampler.logprobs is not None and number not in errors
    ]
    logprobs = _logprobs(logits, rows, told, ids, token_text) if told else {}
    return [Choice(token_id, logprobs.get(number), errors.get(number)) for number, token_id in enumerate(ids)]


def _choose_specially(
    logits: Tensor,
    rows: Sequence[Row],
    special: list[int],
    ids: list[int],
    errors: dict[int, GymError],
) -> None:
    """Rows that are shaped, masked or drawn; fills in their ``ids``."""
    scores = logits[special]
    changed = False
    for place, number in enumerate(special):
        row = rows[number]
        if row.sampler.shaped:
            row.sampler.shape(scores[place])
            changed = True
    guided = [place for place, number in enumerate(special) if rows[number].allowed is not None]
    if guided:
        banned = torch.zeros(scores.shape, dtype=torch.bool)
        for place in guided:
            banned[place] = torch.from_numpy(rows[special[place]].allowed).logical_not()
        scores.masked_fill_(banned.to(scores.device), -math.inf)
    if changed or guided:
        values, best = scores.max(dim=-1)
        for number, token_id, peak in zip(special, best.tolist(), values.tolist(), strict=True):
            ids[number] = token_id
            if not math.isfinite(peak):
                errors[number] = _nothing_left()
    groups: dict[tuple[float, int, float, float], list[int]] = defaultdict(list)
    for place, number in enumerate(special):
        if not rows[number].sampler.greedy and number not in errors:
            groups[rows[number].sampler.settings].append(place)
    for settings, places in groups.items():
        group = scores if len(places) == len(special) else scores[places]
        for warper in _warpers(settings):
            group = warper(None, group)
        sums = torch.softmax(group, dim=-1).cumsum(dim=-1, dtype=torch.float64)
        uniforms = torch.tensor(
            [[rows[special[place]].sampler.uniform()] for place in places], dtype=torch.float64
        ).to(sums.device)
        drawn = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True).flatten().tolist()
        for place, token_id in zip(places, drawn, strict=True):
            ids[special[place]] = token_id


def _logprobs(
    logits: Tensor, rows: Sequence[Row], told: list[int], ids: list[int], token_text: Callable[[int], str]
) -> dict[int, TokenLogprob]:
    shares = torch.log_softmax(logits[told].float(), dim=-1)
    chosen = shares.gather(1, torch.tensor([[ids[number]] for number in told], device=logits.device))
    most = max(rows[number].sampler.logprobs or 0 for number in told)
    values, places = shares.topk(min(most, shares.shape[1]), dim=-1)
    found: dict[int, TokenLogprob] = {}
    lists = zip(told, chosen.flatten().tolist(), values.tolist(), places.tolist(), strict=True)
    for number, own, top_values, top_ids in lists:
        count = rows[number].sampler.logprobs or 0
        top = tuple(
            (token_id, token_text(token_id), value)
            for token_id, value in zip(top_ids[:count], top_values[:count], strict=True)
        )
        found[number] = TokenLogprob(ids[number], token_text(ids[number]), own, top)
    return found


@lru_cache(maxsize=256)
def _warpers(settings: tuple[float, int, float, float]) -> tuple[Any, ...]:
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    temperature, top_k, top_p, min_p = settings
    wanted: list[Any] = []
    if temperature != 1.0:
        wanted.append(TemperatureLogitsWarper(temperature))
    if top_k:
        wanted.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        wanted.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        wanted.append(MinPLogitsWarper(min_p))
    return tuple(wanted)


@lru_cache(maxsize=256)
def _repetition_penalty(penalty: float) -> Any:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    return RepetitionPenaltyLogitsProcessor(float(penalty))


def _not_numbers(peak: float) -> GymError:
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"the model's logits are not numbers (the largest is {peak})",
        "its weights, or the variant's, are broken: try the base without a variant",
    )


def _nothing_left() -> GymError:
    return GymError(
        ErrorCode.DATA_INVALID,
        "no token is left to choose: the JSON schema or the logit_bias excludes all of them",
    )
