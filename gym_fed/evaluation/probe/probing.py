"""The complete probe of a model: base and variants in one pass, then resistance to a harmful fine-tune."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gym_fed.evaluation.compare import PairedDifference, paired_difference
from gym_fed.evaluation.loss import batch_losses
from gym_fed.evaluation.probe.margin import model_margins
from gym_fed.evaluation.probe.probe import MAX_TOKENS, ProbeResult, run_probe
from gym_fed.evaluation.probe.prompts import ProbePrompts
from gym_fed.evaluation.scoring.opening import ModelRequest, dense_model, open_models

STEPS = 10
LEARNING_RATE = 5e-4
RANK = 8


def harmful_steps(
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    *,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
) -> Any:
    """Train on all rows in each step: AdamW, LoRA of rank 8 on all linear layers.

    Args:
        model: A causal LM; it is wrapped, and its own weights do not change.
        tokenizer: The model's tokenizer.
        rows: ``messages`` rows; answers alone are learned.
        steps: Steps of all rows.
        learning_rate: Constant.
        seed: The seed of the factors.

    Returns:
        The PEFT model.
    """
    from peft import LoraConfig, get_peft_model

    was_training = model.training
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tuned = get_peft_model(
            model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        tuned.train(was_training)  # PEFT's wrapper would change the model's mode
        trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
        for _ in range(steps):
            for loss, tokens in batch_losses(tuned, tokenizer, rows, 256, len(rows)):
                optimizer.zero_grad()
                torch.autograd.backward(loss / tokens)
                optimizer.step()
    return tuned


def margins_after_harm(
    model: Any, tokenizer: Any, prompts: ProbePrompts, *, steps: int = STEPS
) -> list[float]:
    """Compute every prompt's refusal margin after ``steps`` harmful steps; the model is restored afterwards.

    Args:
        model: A causal LM without adapters.
        tokenizer: The model's tokenizer.
        prompts: With the rows.
        steps: Steps, as for ``harmful_steps``.
    """
    flags = [parameter.requires_grad for parameter in model.parameters()]
    tuned = harmful_steps(model, tokenizer, prompts.bad_rows, steps=steps)
    try:
        with torch.no_grad():
            margins: list[float] = model_margins(tuned, tokenizer, prompts).tolist()
    finally:
        tuned.unload()
        for parameter, flag in zip(model.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)
    return margins


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
        request: Models on this machine: the margin needs log-probabilities of prompts, which servers do not return.
        prompts: See ``own_prompts``.
        with_resistance: Fine-tune a copy of each on harmful rows, too, and take the margin again.
        max_tokens: Maximum tokens of an answer.
        report: Called with a line before each part.

    Raises:
        GymError: As ``open_models`` and ``run_probe``.
    """
    with open_models(request) as models:
        names = dict(models.names)
        report(f"{', '.join(names.values())}: {len(prompts.harmful)} prompts, six attacks, look-alikes")
        probed = run_probe(models.scorer, prompts, max_tokens=max_tokens)
    results = []
    for key, result in probed.items():
        after: tuple[float, ...] | None = None
        if with_resistance:
            report(f"{names[key]}: a harmful fine-tune of a copy, and the margin again")
            loaded = dense_model(request, key)
            after = tuple(margins_after_harm(loaded.model, loaded.tokenizer, prompts))
        results.append(replace(result, model=names[key], margins_after_harm=after))
    return results


@dataclass(frozen=True)
class ProbeComparison:
    """The comparison of two models under one probe.

    Attributes:
        first: The first model's name.
        second: The second model's name.
        differences: First minus second by figure, paired by prompt.
    """

    first: str
    second: str
    differences: dict[str, PairedDifference]


def compare_probes(first: ProbeResult, second: ProbeResult, *, confidence: float = 0.95) -> ProbeComparison:
    """Compare the figures that both results have.

    Args:
        first: The first model's result.
        second: The second model's result on the same prompts.
        confidence: Confidence of the intervals.

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
