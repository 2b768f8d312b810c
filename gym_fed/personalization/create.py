"""Create a variant: train on the user's rows, encode the difference, evaluate it, and add it to the store.

Intermediate results are stored in a folder, so that the work can be interrupted and resumed.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.modeling.adapters import merged
from gym_fed.base.models import load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.schema.base import with_schema_defaults
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, write_atomically
from gym_fed.core.text import counted
from gym_fed.delta.base import model_tensors
from gym_fed.delta.encode import EncodeReport, encode_delta, lora_delta
from gym_fed.delta.factors import lora_change
from gym_fed.personalization.base import Base, LossEvaluator
from gym_fed.personalization.recipe import Encoding, Method, encoding_of, require_fitting, training_config
from gym_fed.personalization.results import AGAIN, CreatedVariant, Listener, begin
from gym_fed.personalization.rows import FORM_KEY, PersonalRows
from gym_fed.personalization.writer import VariantWriter
from gym_fed.quantization.refining import distiller
from gym_fed.training.run.folder import RunFolder
from gym_fed.training.trainer import Trainer

if TYPE_CHECKING:
    from gym_fed.delta.encode import Refine


@dataclass(frozen=True)
class CreateRequest:
    """A variant to create; see ``PersonalizedTrainer.create_variant``."""

    name: str
    owner: str
    revision: int
    rows: PersonalRows
    as_chat: bool | None
    replace: bool
    output: Path | None
    overwrite: bool


def create(
    request: CreateRequest,
    *,
    base_model: str,
    writer: VariantWriter,
    method: Method,
    codec: str,
    encoding: Mapping[str, Any] | CodecPolicy | None,
    training: Mapping[str, Any] | TrainingConfig | None,
    device: str,
    listener: Listener,
) -> CreatedVariant:
    """Create a variant; see ``PersonalizedTrainer.create_variant``."""
    begin(listener, f"loading {base_model}")
    base = Base.load(base_model, device)
    rows = request.rows.formed(base.tokenizer, request.as_chat)
    base = base.for_rows(rows)
    folder = request.output or writer.work_folder(request.name)
    if request.overwrite:
        _forget(folder)
    chosen_encoding = encoding_of(method, codec, encoding, base.spec)
    config = training_config(method, rows, folder / "run", base_model, training, base.size)
    config = config.model_copy(update={"device": device})
    require_fitting(config, chosen_encoding)
    job = VariantJob(folder, config, chosen_encoding)
    evaluator = LossEvaluator(rows.kind, rows.judged, base.tokenizer, base.model, config.max_length)
    result = train_and_encode(job, base, rows, evaluator, listener)
    note = _note(job, result)
    begin(listener, "adding it to the store")
    with writer.opened() as store:
        record = writer.put(
            store,
            job.delta_path,
            request.name,
            request.owner,
            revision=request.revision,
            note=note,
            replace=request.replace,
            figures={"loss_base": result.loss_before, "loss": result.loss_encoded},
        )
        path = store.path(request.name)
    if request.output is None:
        shutil.rmtree(folder)
    return CreatedVariant(
        name=record.name,
        owner=record.owner,
        revision=record.revision,
        signed=record.is_signed,
        path=path,
        sha256=record.sha256,
        size_bytes=record.size_bytes,
        bits_per_weight=result.report.bits_per_weight,
        times_smaller=16.0 / result.report.bits_per_weight,
        base_model=record.base_model,
        base_digest=record.base_digest,
        form=rows.form,
        learnt_as=rows.learnt_as,
        judged_on=rows.judged_on,
        loss_before=result.loss_before,
        loss_trained=result.loss_trained,
        loss_encoded=result.loss_encoded,
        kept=result.kept,
        chosen_before=result.chosen_before,
        chosen_encoded=result.chosen_encoded,
        steps=result.steps,
        best_step=result.best_step,
        encoding=chosen_encoding.why,
        note=note,
        rows=result.rows,
    )


@dataclass(frozen=True)
class VariantJob:
    """The settings and the folder of the work on one variant.

    Attributes:
        folder: Folder that contains ``order.json``, the run in ``run/``, and the delta.
        training: Training config whose ``output_dir`` is ``run/``.
    """

    folder: Path
    training: TrainingConfig
    encoding: Encoding

    @property
    def delta_path(self) -> Path:
        return self.folder / "variant.gymdelta"


@dataclass(frozen=True)
class VariantResult:
    """An encoded delta with its losses; see ``CreatedVariant``."""

    report: EncodeReport
    loss_before: float
    loss_trained: float
    loss_encoded: float
    steps: int
    best_step: int | None
    rows: dict[str, Any]
    chosen_before: float | None
    chosen_encoded: float | None

    @property
    def kept(self) -> float | None:
        """The fraction of the training gain that the file retains; None if training gained nothing."""
        return kept_share(self.loss_before, self.loss_trained, self.loss_encoded)


def kept_share(before: float, trained: float, encoded: float) -> float | None:
    """Return the fraction of the training gain that the encoded variant retains; None if training gained nothing."""
    gain = before - trained
    return (before - encoded) / gain if math.isfinite(gain) and gain > 0 else None


def train_and_encode(
    job: VariantJob, base: Base, rows: PersonalRows, evaluator: LossEvaluator, listener: Listener
) -> VariantResult:
    """Train (or resume training), encode and evaluate; the delta is then at ``job.delta_path``.

    Raises:
        GymError: ``INTERRUPTED``, after writing a checkpoint; ``FILE_EXISTS`` if the folder contains other work; errors
            from the data, the model and the training.
    """
    _claim(job, base, rows)
    begin(listener, "measuring the base")
    before, chosen_before = evaluator.loss(base.model), evaluator.chosen_loss(base.model)
    model, summary = _trained(job, rows, listener)
    begin(listener, "measuring the variant")
    trained = evaluator.loss(model)
    begin(listener, "encoding")
    report = encode(model, job, base, rows, listener)
    with base.opened(job.delta_path) as delta, base.plus(delta) as encoded_model:
        encoded, chosen_encoded = evaluator.loss(encoded_model), evaluator.chosen_loss(encoded_model)
    best = summary.get("best_step")
    return VariantResult(
        report,
        before,
        trained,
        encoded,
        int(summary["steps"]),
        None if best is None else int(best),
        summary.get("rows", {}),
        chosen_before,
        chosen_encoded,
    )


def encode(model: Any, job: VariantJob, base: Base, rows: PersonalRows, listener: Listener) -> EncodeReport:
    """Encode the trained change, as factors with dense tensors or as values in the policy's codec.

    Raises:
        GymError: ``INTERRUPTED`` during the distillation of scales; errors from ``lora_change``.
    """
    policy = job.encoding.policy
    extra = {FORM_KEY: rows.form}
    if job.encoding.keeps_factors:
        change = lora_change(model, model_tensors(base.model))
        return lora_delta(
            change.factors, job.delta_path, base.spec, policy=policy, extra=extra, values=change.values
        )
    merged_model = merged(model)
    tuned = {name: tensor.to("cpu") for name, tensor in model_tensors(merged_model).items()}
    refine = _refine(tuned, job, base, rows, listener) if policy.distill_steps else None
    return encode_delta(tuned, base.model, policy, job.delta_path, base.spec, extra=extra, refine=refine)


def _claim(job: VariantJob, base: Base, rows: PersonalRows) -> None:
    """Initialise the folder, or check that it contains the same work. Only the encoding may differ."""
    job_facts = {
        "rows": rows.digest,
        "base": base.spec.digest,
        "training": job.training.model_dump(mode="json", exclude={"output_dir"}),
    }
    path = job.folder / "order.json"
    if path.exists():
        recorded = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(training := recorded.get("training"), dict):
            training = with_schema_defaults(training, job.training)
            recorded["training"] = {key: value for key, value in training.items() if key != "output_dir"}
        changed = [key for key, value in job_facts.items() if recorded.get(key) != value]
        if changed:
            reason = f"{job.folder} contains the unfinished work of a variant with different {' and '.join(changed)}"
            remedy = "use the same settings, pass --overwrite to start over, or choose another output"
            raise GymError(ErrorCode.FILE_EXISTS, reason, remedy)
        return
    if job.folder.exists() and any(job.folder.iterdir()):
        reason = f"{job.folder} is not empty, and does not contain unfinished work of a variant"
        raise GymError(ErrorCode.FILE_EXISTS, reason, "choose a new folder")
    make_folder(job.folder, 0o700)
    write_atomically(path, json.dumps(job_facts, indent=2, sort_keys=True).encode())


def _trained(job: VariantJob, rows: PersonalRows, listener: Listener) -> tuple[Any, dict[str, Any]]:
    """Return the trained model and the metrics of the run."""
    run = RunFolder(Path(job.training.output_dir))
    if run.result.exists():
        listener.phase("training is already finished")
        figures: dict[str, Any] = json.loads(run.result.read_text(encoding="utf-8"))
        return load_model(str(run.path), device=job.training.device).model, figures
    phase = f"training on {counted(len(rows.train), 'row')}"
    if (checkpoint := run.last_checkpoint()) is not None:
        phase += f", resuming after step {checkpoint.name.rpartition('-')[2]}"
    begin(listener, phase)
    trainer = Trainer(
        job.training,
        on_rows=lambda name, counts: listener.rows(name, counts, job.training.max_length),
        on_report=listener.trained,
        should_stop=listener.should_stop,
    )
    try:
        result = trainer.train(rows.train, rows.held_out or None)
    except GymError as error:
        if error.code is not ErrorCode.INTERRUPTED:
            raise
        raise GymError(error.code, error.message, AGAIN) from error
    return result.model, result.summary()


def _refine(
    tuned: dict[str, Any], job: VariantJob, base: Base, rows: PersonalRows, listener: Listener
) -> Refine:
    """Return a function that distils scales on the training rows."""

    def on_step(step: int, total: int, loss: float) -> None:
        listener.distilled(step, total, loss)
        if listener.should_stop():
            raise GymError(
                ErrorCode.INTERRUPTED, f"stopped while distilling, at step {step} of {total}", AGAIN
            )

    return distiller(
        job.encoding.policy,
        base.model,
        model_tensors(base.model),
        tuned,
        rows.supervised,
        base.tokenizer,
        max_length=job.training.max_length,
        seed=job.training.seed,
        on_step=on_step,
    )


def _forget(folder: Path) -> None:
    """Delete a folder of unfinished work. Raise ``FILE_EXISTS`` for any other folder."""
    if not folder.exists():
        return
    if not (folder / "order.json").exists() and any(folder.iterdir()):
        reason = f"{folder} does not contain unfinished work of a variant, so it is not deleted"
        raise GymError(ErrorCode.FILE_EXISTS, reason, "choose another folder")
    shutil.rmtree(folder)


def _note(job: VariantJob, result: VariantResult) -> str:
    """Return the manifest's note on how the variant was trained, without information about the rows.

    The manifest is distributed with the variant, so every user of the variant can read the note.
    """
    from gym_fed.version import __version__

    training, steps = job.training, result.best_step or result.steps
    return f"gym-fed {__version__}: {training.algorithm}, {training.finetuning}, {counted(steps, 'step')}"
