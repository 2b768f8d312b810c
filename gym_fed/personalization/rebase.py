"""Follow the community: a variant is carried to a new global version, measured there, and refitted if asked.

Carried are the same signs, codes and factors, scales perhaps smaller. What the new version has learnt of the variant
already (a soup that its owner contributed to) would be added a second time, so the scale of what is carried is searched
on the owner's rows: ``base' + alpha * delta``, alpha in (0, 1].
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gym_quant.codec import CodecError, Params, Payload
from gym_quant.registry import get_codec

from gym_fed.delta.file import DeltaFile
from gym_fed.delta.manifest import TensorRecord
from gym_fed.delta.writer import DeltaEntry, DeltaInfo, write_delta
from gym_fed.errors import ErrorCode, GymError
from gym_fed.models import quiet_loading
from gym_fed.personalization.made import Losses, begin, require_wanted
from gym_fed.personalization.making import Order, make
from gym_fed.personalization.recipe import Encoding, Method

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.personalization.base import Base
    from gym_fed.personalization.made import Listener
    from gym_fed.personalization.making import Judge
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


def carry_delta(delta: DeltaFile, onto: BaseSpec, out: Path, scale: float = 1.0) -> DeltaInfo:
    """Write ``scale * delta`` as a delta of another base.

    At scale 1 the payload is the same to the bit; at others the scales (or values) are multiplied and rounded to their
    number format, and everything else is the same.

    Args:
        delta: Of the old base.
        onto: The new one.
        out: The new file.
        scale: Above 0.

    Raises:
        GymError: ``BASE_MISMATCH`` naming the first tensor that the new base has not, or in another shape;
            ``DELTA_INVALID`` naming one whose scales overflow their number format.
    """
    require_shapes(delta, onto)
    if scale <= 0.0:
        raise GymError(ErrorCode.USAGE, f"scale {scale:g} is not above 0", "at 0 nothing is left to carry")
    entries = [
        DeltaEntry(
            record.name,
            record.shape,
            record.codec,
            _scaled_params(record, scale),
            partial(_payload, delta, record.name, scale),
        )
        for record in delta.manifest.tensors
    ]
    return write_delta(out, entries, onto, delta.manifest.extra)


def require_shapes(delta: DeltaFile, onto: BaseSpec) -> None:
    """Refuse a base that the delta does not fit.

    Raises:
        GymError: ``BASE_MISMATCH`` naming the tensor.
    """
    for record in delta.manifest.tensors:
        found = onto.shapes.get(record.name)
        if found != record.shape:
            has = "no such tensor" if found is None else f"it in shape {list(found)}"
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"tensor {record.name!r} {list(record.shape)}: the base {onto.model_name!r} has {has}",
                "a variant can be carried to a base of the same architecture only",
            )


def _alone(record: TensorRecord, scale: float) -> Params | None:
    """Parameters that scale the tensor without its payload, if its codec has such."""
    return record.params if scale == 1.0 else get_codec(record.codec).scaled_params(record.params, scale)


def _scaled_params(record: TensorRecord, scale: float) -> Params:
    params = _alone(record, scale)
    return record.params if params is None else params


def _payload(delta: DeltaFile, name: str, scale: float) -> Payload:
    record, payload = delta.record(name), delta.payload(name)
    if _alone(record, scale) is not None:
        return payload
    try:
        return get_codec(record.codec).scaled(payload, record.shape, record.params, scale)
    except CodecError as error:
        raise GymError(ErrorCode.DELTA_INVALID, f"tensor {name!r}: {error}") from error
