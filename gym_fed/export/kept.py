"""How much of a variant's gain its LoRA keeps, on rows that the user gives; without rows, how much of its norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.export.nearest import LoraFactors, factors_of, lora_model
from gym_fed.export.options import Options
from gym_fed.export.source import Source

_LEAST_KEPT = 0.8
"""Below this share a note warns."""
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class KeptGain:
    """Losses on held-out rows, in nats per token.

    The gain of a variant is by how much its loss is below its base's. What its LoRA keeps of it is the LoRA's own gain
    as a share of that: 1 is all of it, 0 none; below 0 the base alone is better than the LoRA.

    Attributes:
        rows: How many.
        base: Loss of the base.
        variant: Loss of the base with the whole delta.
        lora: Loss of the base with the factors.
    """

    rows: int
    base: float
    variant: float
    lora: float

    @property
    def kept(self) -> float | None:
        """The share; None where the variant gains nothing on these rows."""
        gain = self.base - self.variant
        return (self.base - self.lora) / gain if gain > 0.0 and math.isfinite(gain) else None


def kept_gain(source: Source, rank: int | None, rows: Sequence[dict[str, Any]], options: Options) -> KeptGain:
    """Losses of base, variant and LoRA on the same rows.

    Args:
        source: With a delta.
        rank: As for ``factors_of``.
        rows: As for ``heldout_loss``; the variant must not have been trained on them.
        options: Whose ``report`` gets what is measured.

    Raises:
        GymError: ``DATA_INVALID`` when the rows hold nothing to predict.
    """
    from gym_fed.evaluation.loss import heldout_loss

    losses = []
    beside = lora_model(source, rank, options.report)
    for number, (what, model) in enumerate(
        (("base", None), ("variant", source.model), ("LoRA", beside)), start=1
    ):
        options.report(f"measuring the loss of the {what}", number, 3)
        if model is not None:
            losses.append(heldout_loss(model, source.tokenizer, rows))
            continue
        with beside.disable_adapter():
            losses.append(heldout_loss(beside, source.tokenizer, rows))
    return KeptGain(len(rows), *losses)


def require_delta_options(source: Source, options: Options) -> None:
    """Refuse options of a delta's LoRA for an adapter, whose factors are written as they are.

    Raises:
        GymError: ``USAGE``.
    """
    if source.delta is None and (options.rank is not None or options.rows):
        option = "--data" if options.rank is None else "--rank"
        raise GymError(
            ErrorCode.USAGE, f"{option}: {source.name} has an adapter of its own", "it goes with a variant"
        )


def lora_facts(source: Source, options: Options) -> dict[str, Any]:
    """What ``export.json`` says of the factors of a delta: ``lora``, and ``notes`` for the user."""
    found = factors_of(source, options.rank, options.report)
    lora: dict[str, Any] = {
        "rank": found.rank,
        "matrices": len(found.factors),
        "exact": not found.nearest,
        "squared_norm_kept": found.norm_kept,
        "left_out": dict(found.left_out),
    }
    notes = _left_out_notes(found)
    if not options.rows:
        if found.norm_kept < _LEAST_KEPT:
            notes.append(
                f"LoRA of rank {found.rank} keeps {found.norm_kept:.1%} of the delta's squared norm; how much of "
                "its gain is not known: measure it with --data FILE of held-out rows"
            )
        return {"lora": lora, "notes": notes}
    gain = kept_gain(source, options.rank, options.rows, options)
    lora["gain"] = {**asdict(gain), "file": options.rows_name, "kept": gain.kept}
    losses = (
        f"loss {gain.base:.4g} of the base, {gain.variant:.4g} of the variant, {gain.lora:.4g} of the LoRA"
    )
    where = f"on {options.rows_name} ({counted(gain.rows, 'row')}: {losses})"
    if gain.kept is None:
        notes.append(f"the variant gains nothing {where}, so there is no share of a gain to keep")
    elif gain.kept < _LEAST_KEPT:
        notes.append(f"LoRA of rank {found.rank} keeps {gain.kept:.1%} of the gain {where}")
    return {"lora": lora, "notes": notes}


def _left_out_notes(found: LoraFactors) -> list[str]:
    if not found.left_out:
        return []
    names = sorted(found.left_out, key=lambda name: -found.left_out[name])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return [
        f"LoRA holds no norms, biases and embeddings: left out: {counted(len(names), 'changed tensor')}, "
        f"{math.fsum(found.left_out.values()):.1%} of the delta's squared norm: "
        f"{', '.join(names[:_NAMES_SHOWN])}{more}"
    ]
