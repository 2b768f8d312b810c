"""The whole of a rebase: from the store, through carrying and refitting, and into the store again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.train.training import TrainingConfig
from gym_fed.delta.file import DeltaFile
from gym_fed.errors import ErrorCode, GymError
from gym_fed.personalization.base import Base
from gym_fed.personalization.keeping import Shelf
from gym_fed.personalization.made import Listener, RebasedVariant, begin, require_better
from gym_fed.personalization.making import FORM_KEY, Judge, Order
from gym_fed.personalization.rebase import Carried, carry, method_of, product_encoding, refit, require_shapes
from gym_fed.personalization.recipe import encoding_of, require_fitting, set_keys, training_config
from gym_fed.personalization.rows import PersonalRows
from gym_fed.serving.store.records import VariantRecord

_UNREADABLE = (ErrorCode.MODEL_NOT_FOUND, ErrorCode.MODEL_INVALID)


@dataclass(frozen=True)
class Move:
    """What is to be rebased; see ``PersonalizedTrainer.rebase_variant``."""

    name: str
    onto: str
    output_name: str
    rows: PersonalRows | None
    as_chat: bool | None
    steps: int
    force: bool
    overwrite: bool


def move(
    wanted: Move,
    *,
    old_base: str,
    shelf: Shelf,
    codec: str,
    encoding: Mapping[str, Any] | CodecPolicy | None,
    training: Mapping[str, Any] | TrainingConfig | None,
    device: str,
    listener: Listener,
) -> RebasedVariant:
    """Rebase one variant; see ``PersonalizedTrainer.rebase_variant``."""
    with shelf.opened() as store:
        record = store.verify(wanted.name)
        path = store.path(wanted.name)
        renamed = wanted.output_name != wanted.name
        revision = shelf.next_revision(store, wanted.output_name, record.owner, replace=not renamed)
    begin(listener, f"loading {wanted.onto}")
    base = Base.load(wanted.onto, device)
    if base.spec.digest == record.base_digest:
        raise GymError(
            ErrorCode.USAGE,
            f"variant {wanted.name!r} is of {base.spec.model_name!r} ({base.spec.digest[:19]}...) already",
            "give the new global version",
        )
    with DeltaFile.open(path) as delta:
        require_shapes(delta, base.spec)
        if wanted.rows is not None:
            as_chat = _learnt_as_chat(delta) if wanted.as_chat is None else wanted.as_chat
            wanted = replace(wanted, rows=wanted.rows.formed(base.tokenizer, as_chat))
        folder = shelf.work_folder(f"{wanted.output_name}.rebase-{record.sha256[:12]}")
        if wanted.overwrite and folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        judge, old = _judge(wanted.rows, record, delta, base, old_base, device, training, listener)
        carried = carry(delta, base, judge, folder, listener)
        carried = replace(carried, losses=replace(carried.losses, old=old))
        method, rank = method_of(delta)
    if wanted.steps and wanted.rows is not None and judge is not None:
        rows = wanted.rows
        overrides = _refit_overrides(training, wanted.steps, rank)
        config = training_config(
            method, rows, folder / "refit" / "run", str(folder / "start"), overrides, base.context
        )
        how = encoding_of(method, codec, encoding, base.spec)
        require_fitting(config, how)
        order = Order(
            folder / "refit",
            config.model_copy(update={"device": device}),
            product_encoding(how, rank) if how.keeps_factors else how,
        )
        carried = refit(carried, order, base, rows, judge, listener)
    if not wanted.force:
        require_better(carried.losses, bool(wanted.steps))
    note = _note(record, carried)
    begin(listener, "putting it into the store")
    with shelf.opened() as store:
        added = shelf.put(
            store,
            carried.path,
            wanted.output_name,
            record.owner,
            revision=revision,
            note=note,
            replace=not renamed,
        )
        path = store.path(wanted.output_name)
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
        measured_as=None if wanted.rows is None else wanted.rows.learnt_as,
        judged_on="nothing" if wanted.rows is None else wanted.rows.judged_on,
        losses=carried.losses,
        note=note,
    )


def _judge(
    rows: PersonalRows | None,
    record: VariantRecord,
    delta: DeltaFile,
    base: Base,
    old_base: str,
    device: str,
    training: Mapping[str, Any] | TrainingConfig | None,
    listener: Listener,
) -> tuple[Judge | None, float | None]:
    """Who measures, and the loss of the variant on its old base, if that is on this machine.

    Preferences are held against the old base, so that what the new one has learnt of them shows.
    """
    if rows is None:
        return None, None
    length = int(set_keys(training).get("max_length", min(512, base.context or 512)))
    try:
        old = Base.load(old_base, device)
    except GymError as error:
        if error.code not in _UNREADABLE:
            raise
        listener.phase(f"the old base is not at hand ({error.message}): its loss is not measured")
        return Judge(rows.kind, rows.judged, base.tokenizer, base.model, length), None
    if old.spec.digest != record.base_digest:
        listener.phase(f"{old_base} is not the base of {record.name!r}: the loss there is not measured")
        return Judge(rows.kind, rows.judged, base.tokenizer, base.model, length), None
    judge = Judge(rows.kind, rows.judged, old.tokenizer, old.model, length)
    begin(listener, "measuring it on its old base")
    with old.plus(delta) as model:
        return judge, judge.loss(model)


def _learnt_as_chat(delta: DeltaFile) -> bool | None:
    """Whether its rows were turns of a chat, if the delta tells: one that was not made here does not."""
    form = delta.manifest.extra.get(FORM_KEY)
    return None if form is None else form == "chat"


def _refit_overrides(
    training: Mapping[str, Any] | TrainingConfig | None, steps: int, rank: int
) -> dict[str, Any]:
    """The trainer's own overrides, with the number of steps and, of factors, their rank."""
    given = set_keys(training)
    given["max_steps"] = steps
    if rank:
        given["lora"] = {"r": rank, "lora_alpha": 2 * rank, **(given.get("lora") or {})}
    return given


def _note(record: VariantRecord, carried: Carried) -> str:
    """For the manifest: where it came from; nothing of the owner's rows, for the manifest travels with the variant."""
    what = f"rebased from revision {record.revision} of {record.name} on {record.base_digest[:19]}"
    if carried.losses.took_refit:
        what += f", refitted in {carried.steps} steps"
    elif carried.alpha != 1.0:
        what += f", scaled by {carried.alpha:g}"
    return what
