"""From rows to an encoded delta, in a folder where it can be interrupted: train, encode, measure.

What is measured is how well a model fits a person's rows: the loss of what it should say, or of what it should prefer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import logsigmoid

from gym_fed.config.train.training import TrainingConfig
from gym_fed.data.rows import Row, as_kind
from gym_fed.delta.base import model_tensors
from gym_fed.delta.encode import EncodeReport, encode_delta, lora_delta
from gym_fed.errors import ErrorCode, GymError
from gym_fed.evaluation.loss import heldout_loss
from gym_fed.files import write_atomically
from gym_fed.models import load_model
from gym_fed.personalization.base import Base
from gym_fed.personalization.made import AGAIN, Listener, begin
from gym_fed.personalization.recipe import Encoding
from gym_fed.personalization.rows import PersonalKind, PersonalRows
from gym_fed.quantization.refining import distiller
from gym_fed.renamed import with_new_names
from gym_fed.training.algorithms.preference._answers import cut_answers, encode_answers
from gym_fed.training.run.folder import RunFolder
from gym_fed.training.trainer import Trainer
from gym_fed.training.tuning.lora import lora_factors

if TYPE_CHECKING:
    from gym_fed.delta.encode import Refine

BETA = 0.1
"""Of the preference loss that is reported; DPO's own default."""


@contextmanager
def _of_judged_rows() -> Iterator[None]:
    """A refusal counts the rows held out for judging, which are not all that were given."""
    try:
        yield
    except GymError as error:
        raise GymError(
            error.code, f"rows that the variant is judged by: {error.message}", error.hint
        ) from error


class Judge:
    """Losses of models of one architecture on the same rows, in nats.

    Examples: per token, ``heldout_loss``. Preferences: per pair, DPO's loss (Rafailov et al. 2023, equation 7, with
    beta 0.1) against a fixed reference; a model that prefers nothing beyond it has log 2.

    Args:
        kind: Of the rows.
        rows: At least one.
        tokenizer: Of the base.
        reference: For preferences; scored now, and not kept.
        max_length: Tokens a row.
    """

    def __init__(
        self, kind: PersonalKind, rows: Sequence[Row], tokenizer: Any, reference: Any, max_length: int
    ) -> None:
        self._kind = kind
        self._rows = rows
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._pairs: list[dict[str, Any]] = []
        if kind == "preference":
            with _of_judged_rows():
                encoded = encode_answers(tokenizer, rows, ("chosen", "rejected"))
                self._pairs = cut_answers(encoded, max_length)
            self._reference = self._margins(reference)

    def loss(self, model: Any) -> float:
        """Of one model; may be inf or NaN for a broken one."""
        if self._kind == "supervised":
            with _of_judged_rows():
                return heldout_loss(model, self._tokenizer, self._rows, max_length=self._max_length)
        gained = self._margins(model) - self._reference
        return float(-logsigmoid(BETA * gained).mean())

    def chosen_loss(self, model: Any) -> float | None:
        """Of the preferred answers themselves, in nats a token; None of examples.

        The preference loss falls as well where both answers become unlikely, and then neither is said.
        """
        if self._kind == "supervised":
            return None
        chosen = as_kind(self._rows, "supervised")
        return heldout_loss(model, self._tokenizer, chosen, max_length=self._max_length)

    @torch.inference_mode()
    def _margins(self, model: Any) -> torch.Tensor:
        """Log-probability of the chosen answer less that of the rejected one, ``[pairs]`` float32."""
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        try:
            return torch.tensor(
                [
                    _log_prob(model, p, "chosen", device) - _log_prob(model, p, "rejected", device)
                    for p in self._pairs
                ]
            )
        finally:
            model.train(was_training)


def kept_share(before: float, trained: float, encoded: float) -> float | None:
    """How much of what training gained the encoded variant keeps; None where training gained nothing."""
    gain = before - trained
    return (before - encoded) / gain if math.isfinite(gain) and gain > 0 else None


def _log_prob(model: Any, pair: dict[str, Any], answer: str, device: torch.device) -> float:
    """Of an answer after its prompt, in nats."""
    prompt, words = pair["prompt_ids"], pair[f"{answer}_ids"]
    ids = torch.tensor([prompt + words], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    tokens = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return float(tokens[max(0, len(prompt) - 1) :].sum())


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
        if isinstance(training := found.get("training"), dict):
            found["training"] = with_new_names(training, type(order.training).renamed_keys)
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
