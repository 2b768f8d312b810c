"""Follow the community: a variant is carried to a new global version, measured there, and refitted if asked.

What the new version has learnt of the variant already (a soup that its owner contributed to) would be added a second
time, so the scale of what is carried is searched on the owner's rows: ``base' + alpha * delta``, alpha in (0, 1].
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gym_quant.registry import get_codec

from gym_fed.delta.file import DeltaFile
from gym_fed.models import quiet_loading
from gym_fed.personalization.carry import carry_delta
from gym_fed.personalization.made import Losses, begin, require_wanted
from gym_fed.personalization.making import Order, make
from gym_fed.personalization.recipe import Encoding, Method

if TYPE_CHECKING:
    from gym_fed.personalization.base import Base
    from gym_fed.personalization.judge import Judge
    from gym_fed.personalization.made import Listener
    from gym_fed.personalization.rows import PersonalRows

ALPHAS = (0.2, 0.4, 0.6, 0.8, 1.0)
_FINER = (-0.1, 0.1)
_WORTH = 0.02
"""A smaller alpha is taken where it adds more than this share to what the delta gains; otherwise the delta stays as it
is."""


@dataclass(frozen=True)
class Carried:
    """A delta of the new base, and what is known of it."""

    path: Path
    alpha: float
    losses: Losses
    steps: int = 0


def search_alpha(
    judge: Judge, base: Base, carried: DeltaFile, alone: float, listener: Listener
) -> tuple[float, dict[float, float]]:
    """The scale of a delta that fits the rows best, and all losses that were measured, by scale.

    Seven passes over the rows: five evenly spaced scales, and one on either side of the best. ``alone`` is the loss
    of the base without any of it.
    """
    begin(listener, "searching how much of the delta the new base still needs")
    losses: dict[float, float] = {}

    def measure(alpha: float) -> None:
        require_wanted(listener, "while scales were compared")
        with base.plus(carried, alpha) as model:
            found = judge.loss(model)
        losses[alpha] = found if math.isfinite(found) else math.inf

    for alpha in ALPHAS:
        measure(alpha)
    middle = min(losses, key=lambda alpha: losses[alpha])
    for step in _FINER:
        if 0.0 < (alpha := round(middle + step, 6)) <= 1.0:
            measure(alpha)
    best = min(losses, key=lambda alpha: losses[alpha])
    worth = _WORTH * max(0.0, alone - losses[best])
    return (best if losses[1.0] - losses[best] > worth else 1.0), losses


def carry(delta: DeltaFile, base: Base, judge: Judge | None, folder: Path, listener: Listener) -> Carried:
    """Write a delta for the new base, scaled as the rows want it; without rows as it is.

    Raises:
        GymError: ``BASE_MISMATCH`` naming a tensor that the new base has not in that shape.
    """
    begin(listener, f"carrying it to {base.spec.model_name}")
    path = folder / "carried.gymdelta"
    carry_delta(delta, base.spec, path)
    if judge is None:
        return Carried(path, 1.0, Losses())
    alone = judge.loss(base.model)
    with base.opened(path) as carried:
        alpha, losses = search_alpha(judge, base, carried, alone, listener)
    if alpha != 1.0:
        carry_delta(delta, base.spec, path, alpha)
    with base.opened(path) as carried, base.plus(carried) as model:
        scaled = judge.loss(model)
    return Carried(path, alpha, Losses(new_base=alone, carried=losses[1.0], scaled=scaled))


def refit(
    carried: Carried, order: Order, base: Base, rows: PersonalRows, judge: Judge, listener: Listener
) -> Carried:
    """Train on from the new base plus what was carried, and encode the sum of both as one delta.

    Args:
        carried: Where it starts.
        order: Its training starts from ``order.folder / "start"``, which is written here.
        base: The new base.
        rows: The owner's.
        judge: On the owner's rows.
        listener: Hears of the work.

    Returns:
        The refitted delta if it is better than the carried one, which is kept otherwise; with all losses.
    """
    start = Path(str(order.training.model))
    if not start.exists():
        part = start.with_name(f"{start.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        with base.opened(carried.path) as delta, base.plus(delta) as model, quiet_loading():
            model.save_pretrained(part)
        base.tokenizer.save_pretrained(part)
        part.rename(start)
    made = make(order, base, rows, judge, listener)
    losses = replace(carried.losses, refitted=made.loss_encoded)
    path = order.delta_path if losses.took_refit else carried.path
    return Carried(path, carried.alpha, losses, made.steps)


def method_of(delta: DeltaFile) -> tuple[Method, int]:
    """How a variant was trained, by its codecs, and the largest rank of its factors (0 of a full one)."""
    found = [get_codec(record.codec).rank(record.params) for record in delta.manifest.tensors]
    ranks = [rank for rank in found if rank is not None]
    return ("lora", max(ranks)) if ranks else ("full", 0)


def product_encoding(encoding: Encoding, rank: int) -> Encoding:
    """Of the sum of carried and new factors: the best product of the same rank."""
    policy = encoding.policy.model_copy(update={"codec": "lora", "lora_rank": rank})
    return Encoding(
        policy, False, f"the best factors of rank {rank} for what was carried and what was learnt"
    )
