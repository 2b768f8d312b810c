"""Rebase a variant onto a new global version: transfer its delta, evaluate it, and optionally refit it.

The new version may already contain part of the variant, through a soup to which its owner has contributed. That part
would then be added twice. The scale is therefore searched on the owner's rows: ``base' + alpha * delta``, alpha in (0,
1].
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_quant.codec import CodecError, Params, Payload
from gym_quant.registry import get_codec

from gym_fed.base.models import quiet_loading
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder
from gym_fed.core.text import counted
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.manifest import TensorRecord
from gym_fed.delta.writer import DeltaEntry, DeltaInfo, write_delta
from gym_fed.personalization.base import Base, LossEvaluator
from gym_fed.personalization.create import VariantJob, train_and_encode
from gym_fed.personalization.recipe import (
    Encoding,
    Method,
    encoding_of,
    require_fitting,
    set_keys,
    training_config,
)
from gym_fed.personalization.results import (
    Listener,
    Losses,
    RebasedVariant,
    begin,
    require_better,
    require_wanted,
)
from gym_fed.personalization.rows import FORM_KEY, PersonalRows
from gym_fed.personalization.writer import VariantWriter
from gym_fed.serving.store.records import VariantRecord

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec

ALPHAS = (0.2, 0.4, 0.6, 0.8, 1.0)
_FINER = (-0.1, 0.1)
_WORTH = 0.02
"""Minimum increase of the delta's gain, as a fraction of it, for which an alpha below 1 is used."""
_UNREADABLE = (ErrorCode.MODEL_NOT_FOUND, ErrorCode.MODEL_INVALID)


@dataclass(frozen=True)
class RebaseRequest:
    """A variant to rebase; see ``PersonalizedTrainer.rebase_variant``."""

    name: str
    onto: str
    output_name: str
    rows: PersonalRows | None
    as_chat: bool | None
    steps: int
    force: bool
    overwrite: bool


def rebase(
    request: RebaseRequest,
    *,
    old_base: str,
    writer: VariantWriter,
    codec: str,
    encoding: Mapping[str, Any] | CodecPolicy | None,
    training: Mapping[str, Any] | TrainingConfig | None,
    device: str,
    listener: Listener,
) -> RebasedVariant:
    """Rebase a variant; see ``PersonalizedTrainer.rebase_variant``."""
    with writer.opened() as store:
        record = store.verify(request.name)
        path = store.path(request.name)
        renamed = request.output_name != request.name
        revision = writer.next_revision(store, request.output_name, record.owner, replace=not renamed)
    begin(listener, f"loading {request.onto}")
    base = Base.load(request.onto, device)
    if base.spec.digest == record.base_digest:
        onto = f"{base.spec.model_name!r} ({base.spec.digest[:19]}...)"
        reason = f"variant {request.name!r} already belongs to {onto}"
        raise GymError(ErrorCode.USAGE, reason, "pass the new global version")
    with DeltaFile.open(path) as delta:
        require_shapes(delta, base.spec)
        if request.rows is not None:
            as_chat = _learnt_as_chat(delta) if request.as_chat is None else request.as_chat
            formed = request.rows.formed(base.tokenizer, as_chat)
            request, base = replace(request, rows=formed), base.for_rows(formed)
        folder = writer.work_folder(f"{request.output_name}.rebase-{record.sha256[:12]}")
        if request.overwrite and folder.exists():
            shutil.rmtree(folder)
        make_folder(folder, 0o700)
        evaluator, old = _evaluator(request.rows, record, delta, base, old_base, device, training, listener)
        carried = carry(delta, base, evaluator, folder, listener)
        carried = replace(carried, losses=replace(carried.losses, old=old))
        method, rank = method_of(delta)
    if request.steps and request.rows is not None and evaluator is not None:
        rows, overrides = request.rows, _refit_overrides(training, request.steps, rank)
        config = training_config(
            method, rows, folder / "refit" / "run", str(folder / "start"), overrides, base.size
        )
        how = encoding_of(method, codec, encoding, base.spec)
        require_fitting(config, how)
        job = VariantJob(
            folder / "refit",
            config.model_copy(update={"device": device}),
            product_encoding(how, rank) if how.keeps_factors else how,
        )
        carried = refit(carried, job, base, rows, evaluator, listener)
    if not request.force:
        require_better(carried.losses, bool(request.steps))
    note = _note(record, carried)
    begin(listener, "adding it to the store")
    with writer.opened() as store:
        added = writer.put(
            store,
            carried.path,
            request.output_name,
            record.owner,
            revision=revision,
            note=note,
            replace=not renamed,
            figures=carried.losses.figures,
        )
        path = store.path(request.output_name)
    shutil.rmtree(folder)
    return RebasedVariant(
        name=added.name,
        owner=added.owner,
        revision=added.revision,
        signed=added.is_signed,
        path=path,
        sha256=added.sha256,
        size_bytes=added.size_bytes,
        from_base=record.base_digest,
        onto_base=added.base_digest,
        alpha=carried.alpha,
        steps=carried.steps,
        measured_as=None if request.rows is None else request.rows.learnt_as,
        judged_on="nothing" if request.rows is None else request.rows.judged_on,
        losses=carried.losses,
        note=note,
    )


def _evaluator(
    rows: PersonalRows | None,
    record: VariantRecord,
    delta: DeltaFile,
    base: Base,
    old_base: str,
    device: str,
    training: Mapping[str, Any] | TrainingConfig | None,
    listener: Listener,
) -> tuple[LossEvaluator | None, float | None]:
    """Return the evaluator, and the variant's loss on its old base if the old base is on this machine.

    Preferences are measured relative to the old base, so that improvements of the new base are visible.
    """
    if rows is None:
        return None, None
    length = int(set_keys(training).get("max_length", min(512, base.context or 512)))
    try:
        old = Base.load(old_base, device)
    except GymError as error:
        if error.code not in _UNREADABLE:
            raise
        listener.phase(f"the old base is not available ({error.message}): its loss is not measured")
        return LossEvaluator(rows.kind, rows.judged, base.tokenizer, base.model, length), None
    if old.spec.digest != record.base_digest:
        listener.phase(f"{old_base} is not the base of {record.name!r}: its loss is not measured")
        return LossEvaluator(rows.kind, rows.judged, base.tokenizer, base.model, length), None
    evaluator = LossEvaluator(rows.kind, rows.judged, old.tokenizer, old.model, length)
    begin(listener, "measuring it on its old base")
    with old.plus(delta) as model:
        return evaluator, evaluator.loss(model)


def _learnt_as_chat(delta: DeltaFile) -> bool | None:
    """Return True if the variant was trained on chat rows; None if the delta was not created by this package."""
    form = delta.manifest.extra.get(FORM_KEY)
    return None if form is None else form == "chat"


def _refit_overrides(
    training: Mapping[str, Any] | TrainingConfig | None, steps: int, rank: int
) -> dict[str, Any]:
    """Return the trainer's overrides: the number of steps and, if the variant has factors, their rank."""
    given = set_keys(training)
    given["max_steps"] = steps
    if rank:
        given["lora"] = {"r": rank, "lora_alpha": 2 * rank, **(given.get("lora") or {})}
    return given


def _note(record: VariantRecord, carried: Carried) -> str:
    """Return the manifest's note on the variant's origin, without information about the rows: users can read it."""
    origin = f"rebased from revision {record.revision} of {record.name} on {record.base_digest[:19]}"
    if carried.losses.took_refit:
        return f"{origin}, refitted in {counted(carried.steps, 'step')}"
    return origin if carried.alpha == 1.0 else f"{origin}, scaled by {carried.alpha:g}"


@dataclass(frozen=True)
class Carried:
    """A delta for the new base and its losses."""

    path: Path
    alpha: float
    losses: Losses
    steps: int = 0


def search_alpha(
    evaluator: LossEvaluator, base: Base, carried: DeltaFile, alone: float, listener: Listener
) -> tuple[float, dict[float, float]]:
    """Find the best scale of a delta for the rows; also return all measured losses by scale.

    It takes seven passes over the rows: for five evenly spaced scales, and for one on either side of the best.
    ``alone`` is the loss of the base without the delta.
    """
    begin(listener, "searching for the scale that the new base needs")
    losses: dict[float, float] = {}

    def measure(alpha: float) -> None:
        require_wanted(listener, "while comparing scales")
        with base.plus(carried, alpha) as model:
            loss = evaluator.loss(model)
        losses[alpha] = loss if math.isfinite(loss) else math.inf

    for alpha in ALPHAS:
        measure(alpha)
    middle = min(losses, key=lambda alpha: losses[alpha])
    for step in _FINER:
        if 0.0 < (alpha := round(middle + step, 6)) <= 1.0:
            measure(alpha)
    best = min(losses, key=lambda alpha: losses[alpha])
    worth = _WORTH * max(0.0, alone - losses[best])
    return (best if losses[1.0] - losses[best] > worth else 1.0), losses


def carry(
    delta: DeltaFile, base: Base, evaluator: LossEvaluator | None, folder: Path, listener: Listener
) -> Carried:
    """Write a delta for the new base, scaled to fit the rows; without rows, the scale is 1.

    Raises:
        GymError: ``BASE_MISMATCH`` with a tensor that is missing in the new base or has a different shape.
    """
    begin(listener, f"moving it to {base.spec.model_name}")
    path = folder / "carried.gymdelta"
    carry_delta(delta, base.spec, path)
    if evaluator is None:
        return Carried(path, 1.0, Losses())
    alone = evaluator.loss(base.model)
    with base.opened(path) as carried:
        alpha, losses = search_alpha(evaluator, base, carried, alone, listener)
    if alpha != 1.0:
        carry_delta(delta, base.spec, path, alpha)
    with base.opened(path) as carried, base.plus(carried) as model:
        scaled = evaluator.loss(model)
    return Carried(path, alpha, Losses(new_base=alone, carried=losses[1.0], scaled=scaled))


def refit(
    carried: Carried,
    job: VariantJob,
    base: Base,
    rows: PersonalRows,
    evaluator: LossEvaluator,
    listener: Listener,
) -> Carried:
    """Continue training from the new base plus the carried delta, and encode the total change as one delta.

    Args:
        carried: The carried delta, from which training starts.
        job: Job whose training starts from ``job.folder / "start"``, which this function writes.
        evaluator: Evaluator for the owner's rows.

    Returns:
        The refitted delta if it is better than the carried one, otherwise the carried one; with all losses.
    """
    start = Path(str(job.training.model))
    if not start.exists():
        part = start.with_name(f"{start.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        with base.opened(carried.path) as delta, base.plus(delta) as model, quiet_loading():
            model.save_pretrained(part)
        base.tokenizer.save_pretrained(part)
        part.rename(start)
    result = train_and_encode(job, base, rows, evaluator, listener)
    losses = replace(carried.losses, refitted=result.loss_encoded)
    path = job.delta_path if losses.took_refit else carried.path
    return Carried(path, carried.alpha, losses, result.steps)


def method_of(delta: DeltaFile) -> tuple[Method, int]:
    """Return the training method that a variant's codecs imply, and the largest rank of its factors (0 for full)."""
    all_ranks = [get_codec(record.codec).rank(record.params) for record in delta.manifest.tensors]
    ranks = [rank for rank in all_ranks if rank is not None]
    return ("lora", max(ranks)) if ranks else ("full", 0)


def product_encoding(encoding: Encoding, rank: int) -> Encoding:
    """Return the encoding for the sum of carried and new factors: the best product of the same rank."""
    policy = encoding.policy.model_copy(update={"codec": "lora", "lora_rank": rank})
    return Encoding(policy, False, f"the best rank-{rank} factors of the moved and trained change")


def carry_delta(delta: DeltaFile, onto: BaseSpec, out: Path, scale: float = 1.0) -> DeltaInfo:
    """Write ``scale * delta`` as a delta of a different base.

    At scale 1, the payload is bit-identical. At other scales, the stored scales (or values) are multiplied and rounded
    to their number format, and everything else is unchanged.

    Args:
        delta: A delta of the old base.
        onto: Spec of the new base.
        out: Path of the new file.
        scale: The factor, which must be positive.

    Raises:
        GymError: ``BASE_MISMATCH`` with the first tensor that is missing in the new base or has a different shape;
            ``DELTA_INVALID`` with a tensor whose scales overflow their number format.
    """
    require_shapes(delta, onto)
    if scale <= 0.0:
        raise GymError(
            ErrorCode.USAGE, f"scale {scale:g} is not above 0", "at 0, nothing of the delta is left"
        )
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
    """Reject a base whose shapes do not match those of the delta.

    Raises:
        GymError: ``BASE_MISMATCH`` with the first tensor that does not match.
    """
    for record in delta.manifest.tensors:
        shape = onto.shapes.get(record.name)
        if shape != record.shape:
            has = "no such tensor" if shape is None else f"it in shape {list(shape)}"
            reason = f"tensor {record.name!r} {list(record.shape)}: the base {onto.model_name!r} has {has}"
            remedy = "a variant can be moved only to a base with the same architecture"
            raise GymError(ErrorCode.BASE_MISMATCH, reason, remedy)


def _params_at_scale(record: TensorRecord, scale: float) -> Params | None:
    """Return parameters that scale a tensor without changing its payload; None if its codec has no such parameters."""
    return record.params if scale == 1.0 else get_codec(record.codec).scaled_params(record.params, scale)


def _scaled_params(record: TensorRecord, scale: float) -> Params:
    params = _params_at_scale(record, scale)
    return record.params if params is None else params


def _payload(delta: DeltaFile, name: str, scale: float) -> Payload:
    record, payload = delta.record(name), delta.payload(name)
    if _params_at_scale(record, scale) is not None:
        return payload
    try:
        return get_codec(record.codec).scaled(payload, record.shape, record.params, scale)
    except CodecError as error:
        raise GymError(ErrorCode.DELTA_INVALID, f"tensor {name!r}: {error}") from error
