"""The whole probe of what a user calls a model: base and variants in one pass, then resistance one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gym_fed.evaluation.compare import PairedDifference, paired_difference
from gym_fed.evaluation.probe.probe import MAX_TOKENS, ProbeResult, run_probe
from gym_fed.evaluation.probe.prompts import ProbePrompts
from gym_fed.evaluation.probe.resistance import margins_after_harm
from gym_fed.evaluation.scoring.opening import ModelRequest, dense_model, open_models


def probe_models(
    request: ModelRequest,
    prompts: ProbePrompts,
    *,
    with_resistance: bool = True,
    max_tokens: int = MAX_TOKENS,
    report: Callable[[str], None] = lambda line: None,
) -> list[ProbeResult]:
    """Probe all models of a request.

    Args:
        request: Of models on this machine: the margin needs log-probabilities of prompts, which servers do not give.
        prompts: See ``own_prompts``.
        with_resistance: Fine-tune a copy of each on harmful rows, too, and take the margin again.
        max_tokens: Of an answer.
        report: Called with a line before each part.

    Raises:
        GymError: As ``open_models`` and ``run_probe``.
    """
    with open_models(request) as models:
        names = dict(models.names)
        report(f"{', '.join(names.values())}: {len(prompts.harmful)} prompts, six attacks, look-alikes")
        found = run_probe(models.scorer, prompts, max_tokens=max_tokens)
    results = []
    for key, result in found.items():
        after: tuple[float, ...] | None = None
        if with_resistance:
            report(f"{names[key]}: a harmful fine-tune of a copy, and the margin again")
            loaded = dense_model(request, key)
            after = tuple(margins_after_harm(loaded.model, loaded.tokenizer, prompts))
        results.append(replace(result, model=names[key], margins_after_harm=after))
    return results


@dataclass(frozen=True)
class ProbeComparison:
    """Two models under one probe.

    Attributes:
        first: Its name.
        second: Its name.
        differences: By figure, first minus second, paired by prompt.
    """

    first: str
    second: str
    differences: dict[str, PairedDifference]


def compare_probes(first: ProbeResult, second: ProbeResult, *, confidence: float = 0.95) -> ProbeComparison:
    """The difference of every figure that both have.

    Args:
        first: Of the model.
        second: Of the other, on the same prompts.
        confidence: Of the intervals.

    Raises:
        GymError: ``USAGE`` for other numbers of prompts.
    """
    theirs = second.values()
    differences = {
        name: paired_difference(values, theirs[name], confidence=confidence)
        for name, values in first.values().items()
        if name in theirs
    }
    return ProbeComparison(first.model, second.model, differences)
