"""Compares samples with what came out when they were run again, on this machine or another."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gym_fed.evaluation.results import SampleResult

LOGPROB_TOLERANCE = 1e-3
"""Nats by which log-likelihoods may differ between machines."""
TIE_NATS = 1e-2
"""An answer may go on otherwise behind a token that was likelier than the second by less than this."""
_METRIC_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Replayed:
    """One sample, before and again.

    Attributes:
        difference: What differs beyond rounding, in words; None where nothing does.
        parted: At which token the answer parted from the other after a tie; None where it did not.
        logprob_error: Largest difference of a log-likelihood, in nats; 0 for an answer.
    """

    difference: str | None
    parted: int | None = None
    logprob_error: float = 0.0


def compare_sample(before: SampleResult, again: SampleResult) -> Replayed:
    """Whether a sample came out the same.

    Log-likelihoods may differ by 1e-3 nats, and then the likeliest choice must be the same one, unless two were as near
    to each other. An answer has the same tokens up to a tie of under 1e-2 nats; that it was one, both runs must say:
    margins of a record can be forged, those of one's own run cannot.

    Args:
        before: As recorded.
        again: As it came out on this machine.
    """
    if before.row_sha256 != again.row_sha256:
        return Replayed("is another row")
    if before.prompt != again.prompt:
        return Replayed("has another prompt")
    if before.choices != again.choices or before.target != again.target:
        return Replayed("has other choices, or another target")
    if before.answer is not None or again.answer is not None:
        return _compare_answers(before, again)
    if len(before.logprobs) != len(again.logprobs):
        return Replayed(f"{len(again.logprobs)} log-likelihoods instead of {len(before.logprobs)}")
    error = max((_distance(a, b) for a, b in zip(before.logprobs, again.logprobs, strict=True)), default=0.0)
    if not error <= LOGPROB_TOLERANCE:
        return Replayed(f"a log-likelihood differs by {error:.3g} nats", logprob_error=error)
    chosen, other = _likeliest(before), _likeliest(again)
    if chosen != other and _distance(before.logprobs[chosen], before.logprobs[other]) > LOGPROB_TOLERANCE:
        return Replayed(f"choice {other} is the likeliest instead of {chosen}", logprob_error=error)
    return Replayed(_other_metrics(before, again) if chosen == other else None, logprob_error=error)


def _compare_answers(before: SampleResult, again: SampleResult) -> Replayed:
    if before.answer is None or again.answer is None:
        return Replayed("one is an answer, the other a choice")
    pairs = zip(before.token_ids, again.token_ids, strict=False)
    shared = min(len(before.token_ids), len(again.token_ids))
    at = next((place for place, (a, b) in enumerate(pairs) if a != b), shared)
    if at == len(before.token_ids) == len(again.token_ids):
        if before.answer != again.answer:
            return Replayed("the same tokens stand for another text")
        return Replayed(_other_metrics(before, again))
    if all(at < len(one.margins) and 0 <= one.margins[at] < TIE_NATS for one in (before, again)):
        return Replayed(None, parted=at)
    return Replayed(f"the answer is another one from token {at} on, and that was no tie")


def _other_metrics(before: SampleResult, again: SampleResult) -> str | None:
    if before.metrics.keys() != again.metrics.keys():
        return "has other metrics"
    for name, value in before.metrics.items():
        if not _distance(value, again.metrics[name]) <= _METRIC_TOLERANCE * max(1.0, abs(value)):
            return f"{name} is {again.metrics[name]:g} instead of {value:g}"
    return None


def _likeliest(sample: SampleResult) -> int:
    return max(range(len(sample.logprobs)), key=sample.logprobs.__getitem__, default=0)


def _distance(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) if math.isfinite(a - b) else math.inf
