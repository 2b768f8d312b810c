"""From rows to an encoded delta, in a folder where it can be interrupted: train, encode, measure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.config.training import TrainingConfig
from gym_fed.delta.base import model_tensors
from gym_fed.delta.encode import EncodeReport, encode_delta, lora_delta
from gym_fed.errors import ErrorCode, GymError
from gym_fed.files import write_atomically
from gym_fed.models import load_model
from gym_fed.personalization.base import Base
from gym_fed.personalization.judge import Judge, kept_share
from gym_fed.personalization.made import AGAIN, Listener, begin
from gym_fed.personalization.recipe import Encoding
from gym_fed.personalization.rows import PersonalRows
from gym_fed.quantization.refining import distiller
from gym_fed.training.run_folder import RunFolder
from gym_fed.training.trainer import Trainer
from gym_fed.training.tuning.lora import lora_factors

if TYPE_CHECKING:
    from gym_fed.delta.encode import Refine

FORM_KEY = "rows"
"""Under it a delta's manifest (``extra``) says of what form the rows were: ``rows.Form``."""


@dataclass(frozen=True)
class Order:
    """What is to be made.

    Attributes:
        folder: Of this work: ``order.json``, the run in ``run/``, and the delta.
        training: Its ``output_dir`` is ``run/``.
        encoding: How it is written.
    """

    folder: Path
    training: TrainingConfig
    encoding: Encoding

    @property
    def delta_path(self) -> Path:
        return self.folder / "variant.gymdelta"


@dataclass(frozen=True)
class Made:
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
        """Share of what training gained that the file keeps."""
        return kept_share(self.loss_before, self.loss_trained, self.loss_encoded)


def make(order: Order, base: Base, rows: PersonalRows, judge: Judge, listener: Listener) -> Made:
    """Train, or go on where that was stopped, encode, and measure; the delta is then at ``order.delta_path``.

    Raises:
        GymError: ``INTERRUPTED`` with a checkpoint kept; ``FILE_EXISTS`` for a folder with other work; what data, model
            and training give.
    """
    _claim(order, base, rows)
    begin(listener, "measuring the base")
    before, chosen_before = judge.loss(base.model), judge.chosen_loss(base.model)
    model, summary = _trained(order, rows, listener)
    begin(listener, "measuring what was learnt")
    trained = judge.loss(model)
    begin(listener, "encoding")
    report = encode(model, order, base, rows, listener)
    with base.opened(order.delta_path) as delta, base.plus(delta) as whole:
        encoded, chosen_encoded = judge.loss(whole), judge.chosen_loss(whole)
    best = summary.get("best_step")
    return Made(
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


def encode(model: Any, order: Order, base: Base, rows: PersonalRows, listener: Listener) -> EncodeReport:
    """Write what training changed.

    Raises:
        GymError: ``INTERRUPTED`` while scales are distilled; ``MODEL_INVALID`` for more than factors.
    """
    policy = order.encoding.policy
    extra = {FORM_KEY: rows.form}
    if order.encoding.keeps_factors:
        return lora_delta(lora_factors(model), order.delta_path, base.spec, policy=policy, extra=extra)
    whole = model.merge_and_unload() if hasattr(model, "peft_config") else model
    tuned = {name: tensor.to("cpu") for name, tensor in model_tensors(whole).items()}
    refine = _refine(tuned, order, base, rows, listener) if policy.distill_steps else None
    return encode_delta(tuned, base.model, policy, order.delta_path, base.spec, extra=extra, refine=refine)


def _claim(order: Order, base: Base, rows: PersonalRows) -> None:
    """Begin the folder, or check that it holds the same work. The encoding may have changed, and is done again."""
    what = {
        "rows": rows.digest,
        "base": base.spec.digest,
        "training": order.training.model_dump(mode="json", exclude={"output_dir"}),
    }
    path = order.folder / "order.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key, value in what.items() if found.get(key) != value]
        if changed:
            raise GymError(
                ErrorCode.FILE_EXISTS,
                f"{order.folder}: holds the unfinished work of a variant with other {' and '.join(changed)}",
                "give what was given then, pass --overwrite to begin anew, or choose another output",
            )
        return
    if order.folder.exists() and any(order.folder.iterdir()):
        raise GymError(
            ErrorCode.FILE_EXISTS,
            f"{order.folder}: is not empty and holds no work of this kind",
            "name a new folder",
        )
    order.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(path, json.dumps(what, indent=2, sort_keys=True).encode())


def _trained(order: Order, rows: PersonalRows, listener: Listener) -> tuple[Any, dict[str, Any]]:
    """The trained model and the run's figures."""
    run = RunFolder(Path(order.training.output_dir))
    if run.result.exists():
        listener.phase("training was finished before")
        found: dict[str, Any] = json.loads(run.result.read_text(encoding="utf-8"))
        return load_model(str(run.path), device=order.training.device).model, found
    begun = run.last_checkpoint()
    begin(
        listener,
        f"training on {len(rows.train)} rows"
        if begun is None
        else f"training on {len(rows.train)} rows, going on after step {begun.name.rpartition('-')[2]}",
    )
    trainer = Trainer(
        order.training,
        on_rows=lambda name, counts: listener.rows(name, counts, order.training.max_length),
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
    tuned: dict[str, Any], order: Order, base: Base, rows: PersonalRows, listener: Listener
) -> Refine:
    """Scale distillation on the rows that were trained on."""

    def on_step(step: int, total: int, loss: float) -> None:
        listener.distilled(step, total, loss)
        if listener.should_stop():
            raise GymError(
                ErrorCode.INTERRUPTED, f"stopped while distilling, at step {step} of {total}", AGAIN
            )

    return distiller(
        order.encoding.policy,
        base.model,
        model_tensors(base.model),
        tuned,
        rows.supervised,
        base.tokenizer,
        max_length=order.training.max_length,
        seed=order.training.seed,
        on_step=on_step,
    )
