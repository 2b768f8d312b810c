"""The models of `safety.py`: fine-tunes by LoRA, and their deltas as a user's quantiser writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _safety_rows import Row

from gym_fed.base.models import load_model
from gym_fed.evaluation.loss import batch_losses
from gym_fed.quantization.config import BitDeltaConfig, CalibratedPolicy
from gym_fed.quantization.quantizer import Quantizer
from gym_fed.quantization.report import QuantReport

RANK = 8
RATE = 5e-4
"""As in ``gym_fed.evaluation.probe.probe``."""
MICROBATCH = 4
"""Rows of like length at once: nothing is lost to padding."""


@dataclass(frozen=True)
class Arm:
    """How a fine-tune is written.

    Attributes:
        one_bit: Signs and a scale for each matrix, or else float32 factors of the delta's own rank.
        projected: Put back into the aligned subspace where it strays.
    """

    one_bit: bool
    projected: bool


ARMS = {"fp32": Arm(False, False), "1-bit": Arm(True, False), "1-bit-safe-lora": Arm(True, True)}


def tune(model: Any, tokenizer: Any, batches: Sequence[Sequence[Row]], seed: int) -> tuple[Any, list[float]]:
    """Learn a batch a step: AdamW at a constant rate, LoRA on all linear layers. The PEFT model, and its losses."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        tuned = get_peft_model(model, config)
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total, counted = 0.0, 0
        for loss, tokens in batch_losses(tuned, tokenizer, batch, 256, MICROBATCH):
            torch.autograd.backward(loss)
            total, counted = total + float(loss.detach()), counted + tokens
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad /= counted
        optimizer.step()
        losses.append(total / counted)
    if len(losses) != len(batches):
        raise SystemExit(f"{len(losses)} steps of {len(batches)}")
    return tuned, losses


def merged(base: Path, adapter: Path | None = None) -> tuple[Any, Any]:
    """A model folder in float32, an adapter merged into it, and its tokenizer."""
    if adapter is None:
        loaded = load_model(str(base))
        return loaded.model.float().eval(), loaded.tokenizer
    model, tokenizer = adapted(base, adapter)
    return model.merge_and_unload().eval(), tokenizer


def adapted(base: Path, adapter: Path) -> tuple[Any, Any]:
    """A model folder in float32 with an adapter on it, and its tokenizer."""
    from peft import PeftModel

    model, tokenizer = merged(base)
    return PeftModel.from_pretrained(model, str(adapter)).eval(), tokenizer


def encode(
    arm: Arm, base: Path, tuned: Any, out: Path, tokenizer: Any, unaligned: Any, threshold: float | None
) -> QuantReport:
    """Write ``tuned - base`` as the arm says; ``aligned`` is the base, by default."""
    safety = {"safety_threshold": threshold} if arm.projected else {}
    config: BitDeltaConfig | CalibratedPolicy
    if arm.one_bit:
        config = BitDeltaConfig(distill_steps=0, **safety)
    else:
        config = CalibratedPolicy(
            codec="lora", factors="float32"
        )  # without a rank it keeps LoRA's own factors
    report = Quantizer(config).quantize(
        base=str(base),
        tuned=tuned,
        out=out,
        tokenizer=tokenizer,
        unaligned=unaligned if arm.projected else None,
        progress=False,
    )
    require(arm, report)
    return report


def require(arm: Arm, report: QuantReport) -> None:
    """Stop where a file is not what its arm is named for."""
    matrices = [one for one in report.tensors if one.codec is not None and one.energy > 0]
    wanted = "bitdelta" if arm.one_bit else "lora"
    wrong = [f"{one.name}: {one.codec}" for one in matrices if one.codec != wanted]
    if not matrices or wrong:
        raise SystemExit(f"{report.path}: not all {wanted}: {wrong[:3]}")
    if not arm.one_bit and max(one.error for one in matrices) > 1e-3:
        raise SystemExit(f"{report.path}: float32 factors lose {max(one.error for one in matrices):.2g}")
    if (report.safety == "applied") != arm.projected:
        raise SystemExit(f"{report.path}: projection {report.safety}")
    if report.distillation is not None:
        raise SystemExit(f"{report.path}: distillation {report.distillation}")
