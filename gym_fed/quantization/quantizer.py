"""What both quantisers do: project, plan, encode, distil, write, report."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from gym_quant import CodecError, Encoded, Params, get_codec
from gym_quant.calibration import collect_input_moments, output_error
from gym_quant.distill import Batch, distill_scales
from gym_quant.safety import project_delta
from torch import Tensor

from gym_fed.delta.apply import apply_delta
from gym_fed.delta.base import BaseSpec, checked_tensors
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.errors import ErrorCode, GymError
from gym_fed.quantization.calibration import Calibration, calibration_batches, plain_sequences
from gym_fed.quantization.config import QuantizerConfig
from gym_fed.quantization.models import Kind, Model, kinds_of, linear_aliases, resolve_model
from gym_fed.quantization.report import DistillReport, LayerSafety, QuantizedTensor, QuantReport

ConfigT = TypeVar("ConfigT", bound=QuantizerConfig)
_MOMENT_BATCHES = 64  # more text than this hardly moves a mean square
Coded = dict[str, tuple[str, tuple[int, ...], Encoded]]


@dataclass(frozen=True)
class Plan:
    """Codec of one tensor, its parameters, and why."""

    codec: str
    params: Params
    why: str


@dataclass(frozen=True)
class Work:
    """One quantisation under way.

    Attributes:
        model: The base; used for its architecture and its input embeddings.
        base: Its parameters.
        deltas: What changed, float32 on the CPU, after the safety projection; all of the model at once.
        kinds: What each parameter is.
        batches: Calibration text; empty without.
        moments: Mean square of the input channels of each parameter that is a linear layer's weight.
    """

    model: Any
    spec: BaseSpec
    base: Mapping[str, Tensor]
    deltas: dict[str, Tensor]
    kinds: Mapping[str, Kind]
    batches: list[Batch]
    moments: Mapping[str, Tensor]

    def tuned(self) -> dict[str, Tensor]:
        """The teacher: base plus deltas, in the base's dtype."""
        return {
            name: (old.to(torch.float32) + self.deltas[name].to(old.device)).to(old.dtype)
            for name, old in self.base.items()
        }


class Quantizer(ABC, Generic[ConfigT]):
    """Writes what a fine-tune changed as a ``.gymdelta``; ``config`` says how."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @abstractmethod
    def plan(self, work: Work) -> dict[str, Plan]:
        """A codec for each tensor of ``work.deltas``."""

    @abstractmethod
    def importance(self, plan: Plan, moments: Tensor | None) -> dict[str, Tensor]:
        """What calibration adds to the arguments of the codec's ``encode``."""

    def quantize(
        self,
        base: Model,
        tuned: Model,
        *,
        out: str | Path,
        calibration: Calibration | None = None,
        tokenizer: Any = None,
        aligned: Model | None = None,
        unaligned: Model | None = None,
        progress: bool = True,
    ) -> QuantReport:
        """Write ``tuned - base``.

        Args:
            base: The model that the delta belongs to. It does not change.
            tuned: The fine-tune, of the same architecture; a LoRA run is merged first.
            out: The ``.gymdelta``; replaced as a whole where it exists.
            calibration: Text of the contributor's own; stays on this machine.
            tokenizer: The base's, where the base is a module and calibration is text.
            aligned: For ``safety_threshold``: the safe, instruction-tuned model,
            unaligned: and the model that it was aligned from.
            progress: Show a bar on a terminal.

        Raises:
            GymError: ``CONFIG_INVALID`` when the config needs calibration text or a pair of models that is absent,
                ``BASE_MISMATCH`` for models of another shape, ``DATA_INVALID`` for calibration without content,
                ``DELTA_INVALID`` for values that are not finite or a distillation that diverges.
        """
        self._require(calibration, aligned, unaligned)
        given = resolve_model(base)
        spec = BaseSpec.of(given.model, given.name)
        old = checked_tensors(given.model, spec, "base")
        teacher = resolve_model(tuned).model
        new = checked_tensors(teacher, spec, "tuned")
        deltas = {name: new[name].cpu().float() - old[name].cpu().float() for name in old}
        _check_finite(deltas)
        batches: list[Batch] = []
        if calibration is not None and self.config.calibration_samples:
            batches = calibration_batches(calibration, tokenizer or given.tokenizer, self.config)
            device = next(iter(old.values())).device
            batches = [Batch(b.ids.to(device), b.mask.to(device), b.counted.to(device)) for b in batches]
        moments = _moments(teacher, batches)
        kinds = kinds_of(given.model)
        safety, layers = self._project(deltas, kinds, spec, aligned, unaligned)
        work = Work(given.model, spec, old, deltas, kinds, batches, moments)
        plans = {n: p for n, p in self.plan(work).items() if bool(deltas[n].any())}
        coded: Coded = {}
        for name, plan in plans.items():
            with about_tensor(name):
                extra = self.importance(plan, moments.get(name))
                encoded = get_codec(plan.codec).encode(deltas[name], **plan.params, **extra)
            coded[name] = (plan.codec, tuple(deltas[name].shape), encoded)
        distillation = self._distill(work, coded, progress)
        info = write_delta(out, [_entry(name, *one) for name, one in coded.items()], spec)
        tensors = tuple(_described(name, work, plans.get(name), coded.get(name)) for name in sorted(old))
        bits = 8.0 * info.size_bytes / spec.num_parameters
        return QuantReport(
            Path(out), info.sha256, info.size_bytes, bits, tensors, distillation, safety, layers
        )

    @staticmethod
    def load(path: str | Path, base: Model | None = None) -> DeltaFile:
        """Open a delta, checked against ``base`` where one is given. Close it after use.

        Raises:
            GymError: As for ``DeltaFile.open``.
        """
        if base is None:
            return DeltaFile.open(path)
        given = resolve_model(base)
        return DeltaFile.open(path, BaseSpec.of(given.model, given.name))

    @staticmethod
    def apply(base: Model, path: str | Path, scale: float = 1.0) -> Any:
        """The base plus ``scale`` times the delta. A base given as a module is changed in place and returned.

        Raises:
            GymError: ``BASE_MISMATCH`` when the delta belongs to another base, and as for ``DeltaFile.open``.
        """
        given = resolve_model(base)
        with DeltaFile.open(path, BaseSpec.of(given.model, given.name)) as delta:
            apply_delta(given.model, delta, scale)
        return given.model

    def _require(
        self, calibration: Calibration | None, aligned: Model | None, unaligned: Model | None
    ) -> None:
        config = self.config
        if config.distill_steps and calibration is None:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"distill_steps is {config.distill_steps}, but there is no calibration text",
                "pass calibration=..., or set distill_steps=0",
            )
        if config.safety_threshold is not None and (aligned is None or unaligned is None):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"safety_threshold is {config.safety_threshold}, but "
                f"{'aligned' if aligned is None else 'unaligned'} is absent",
                "pass both models, aligned=... and unaligned=..., or leave safety_threshold out",
            )

    def _project(
        self,
        deltas: dict[str, Tensor],
        kinds: Mapping[str, Kind],
        spec: BaseSpec,
        aligned: Model | None,
        unaligned: Model | None,
    ) -> tuple[str, tuple[LayerSafety, ...]]:
        threshold = self.config.safety_threshold
        if aligned is None or unaligned is None:
            return "not applicable: no pair of an aligned and an unaligned model was given", ()
        if threshold is None:
            return "not applicable: safety_threshold is not set", ()
        safe = checked_tensors(resolve_model(aligned).model, spec, "aligned")
        unsafe = checked_tensors(resolve_model(unaligned).model, spec, "unaligned")
        layers: list[LayerSafety] = []
        for name, kind in sorted(kinds.items()):
            if kind == "matrix" and deltas[name].ndim == 2:
                with about_tensor(name):
                    found = project_delta(
                        deltas[name], safe[name], unsafe[name], threshold, self.config.safety_projection
                    )
                deltas[name] = found.delta
                layers.append(LayerSafety(name, found.cosine, found.replaced))
        return "applied", tuple(layers)

    def _distill(self, work: Work, coded: Coded, progress: bool) -> DistillReport | None:
        config = self.config
        if not config.distill_steps:
            return None
        began = time.monotonic()
        with _bar("distilling scales", config.distill_steps, progress) as on_step:
            try:
                result = distill_scales(
                    work.model,
                    work.base,
                    work.tuned(),
                    coded,
                    work.batches,
                    steps=config.distill_steps,
                    lr=config.distill_lr,
                    bit_lr=config.distill_bits_lr if config.distill_bits else None,
                    loss=config.distill_loss,
                    seed=config.seed,
                    on_step=on_step,
                )
            except CodecError as error:
                raise GymError(ErrorCode.DELTA_INVALID, str(error), "lower distill_lr") from error
        for name, encoded in result.encoded.items():
            coded[name] = (coded[name][0], coded[name][1], encoded)
        return DistillReport(
            config.distill_loss,
            config.distill_steps,
            result.num_scales,
            result.flipped,
            result.loss_before,
            result.loss_after,
            time.monotonic() - began,
        )


def end_plan(codec: str, shape: tuple[int, ...], scale_dtype: str, why: str) -> Plan:
    """The plan of an embedding, head, norm or bias from the config's word for it."""
    wanted: dict[str, Any] = {}
    if codec != "dense":
        wanted["scale_dtype"] = scale_dtype
    if codec in ("bitdelta-row", "int8", "int4") and len(shape) > 1:
        wanted["group_size"] = shape[-1]
    name = "bitdelta" if codec == "bitdelta-row" else codec
    return Plan(name, get_codec(name).normalise(wanted, shape), why)


@contextmanager
def about_tensor(name: str) -> Iterator[None]:
    """A codec's refusal, with the tensor's name."""
    try:
        yield
    except CodecError as error:
        raise GymError(ErrorCode.DELTA_INVALID, f"tensor {name!r}: {error}") from error


def _entry(name: str, codec: str, shape: tuple[int, ...], encoded: Encoded) -> DeltaEntry:
    return DeltaEntry(name, shape, codec, encoded.params, lambda: encoded.payload)


def _check_finite(deltas: Mapping[str, Tensor]) -> None:
    for name, delta in deltas.items():
        if not bool(torch.isfinite(delta).all()):
            raise GymError(
                ErrorCode.DELTA_INVALID,
                f"tensor {name!r}: the delta is not finite",
                "training diverged: lower the learning rate",
            )


def _moments(model: Any, batches: list[Batch]) -> dict[str, Tensor]:
    """By parameter name, a tied head's under the embeddings'."""
    if not batches:
        return {}
    spaced = batches[:: -(-len(batches) // _MOMENT_BATCHES)]
    found = collect_input_moments(model, plain_sequences(spaced), samples=sum(len(b.ids) for b in spaced))
    aliases = linear_aliases(model)
    return {aliases[path]: moments for path, moments in found.items()}


def _described(
    name: str, work: Work, plan: Plan | None, coded: tuple[str, tuple[int, ...], Encoded] | None
) -> QuantizedTensor:
    if plan is None or coded is None:
        return QuantizedTensor(name, None, {}, "unchanged", 0.0, 0.0, None)
    codec, shape, encoded = coded
    delta, moments = work.deltas[name], work.moments.get(name)
    decoded = get_codec(codec).decode(encoded.payload, shape, encoded.params)

    def relative(weights: Tensor | None) -> float:
        whole = output_error(delta, torch.zeros_like(delta), weights)
        return math.sqrt(output_error(delta, decoded, weights) / whole) if whole else 0.0

    bits = 8.0 * get_codec(codec).payload_bytes(shape, encoded.params) / delta.numel()
    output = None if moments is None else relative(moments)
    return QuantizedTensor(name, codec, encoded.params, plan.why, bits, relative(None), output)


@contextmanager
def _bar(what: str, steps: int, shown: bool) -> Iterator[Callable[[int, float], None] | None]:
    """A progress bar with the loss, on a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from gym_fed import console

    if not (shown and console.err.is_terminal):
        yield None
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console.err, transient=True) as progress:
        task = progress.add_task(what, total=steps, loss=math.nan)
        yield lambda step, loss: progress.update(task, completed=step, loss=loss)
