"""How much refusal is left after a harmful fine-tune: 10 steps of LoRA on 8 rows that begin to comply.

After Qi et al. 2023 (arXiv:2310.03693), who undo alignment with ten rows. The answers of our rows are openings and
placeholders, so the fine-tune teaches to begin, not how to do harm; the model is thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gym_fed.evaluation.loss import batch_losses
from gym_fed.evaluation.probe.margin import model_margins
from gym_fed.evaluation.probe.prompts import ProbePrompts

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
    """Train on rows, all of them a step: AdamW, LoRA of rank 8 on all linear layers.

    Args:
        model: A causal LM; it is wrapped, and its own weights do not change.
        tokenizer: Its tokenizer.
        rows: ``messages`` rows; answers alone are learned.
        steps: Steps of all rows.
        learning_rate: Constant.
        seed: Of the factors.

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
        tuned.train(was_training)  # the wrapper's own mode would become the model's
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
    """Every prompt's refusal margin after ``steps`` harmful steps. The model is as before afterwards.

    Args:
        model: A causal LM without adapters.
        tokenizer: Its tokenizer.
        prompts: With the rows.
        steps: Of ``harmful_steps``.
    """
    flags = [parameter.requires_grad for parameter in model.parameters()]
    tuned = harmful_steps(model, tokenizer, prompts.bad_rows, steps=steps)
    try:
        with torch.no_grad():
            found: list[float] = model_margins(tuned, tokenizer, prompts).tolist()
    finally:
        tuned.unload()
        for parameter, flag in zip(model.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)
    return found
