"""Quantise a fine-tune to a small file: project the change for safety, encode it, distil its scales, and report.

The encoder is ``gym_fed.delta.encode``, which contributors also use. This module computes its arguments from text and
models: importance (from the layers' inputs), sensitivity, and refined scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from gym_quant.calibration import collect_input_moments
from gym_quant.codec import CodecError
from gym_quant.distill import Batch, divergence
from gym_quant.registry import get_codec
from gym_quant.safety import project_delta
from torch import Tensor, nn

from gym_fed.base.modeling.adapters import merged
from gym_fed.base.modeling.differences import require_same_settings
from gym_fed.base.models import load_model, load_tuned, model_name
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec, checked_tensors
from gym_fed.delta.budget import MENU, Sensitivity
from gym_fed.delta.encode import encode_source, energy_of, lora_delta
from gym_fed.delta.factors import factors_on
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.delta.policy import parts_of
from gym_fed.delta.vocabulary import attach_vocabulary, split_vocabulary
from gym_fed.quantization.config import BitDeltaConfig, CalibratedPolicy, DeltaQuantConfig
from gym_fed.quantization.refining import (
    CalibrationText,
    Distiller,
    OnStep,
    calibration_batches,
    plain_sequences,
)
from gym_fed.quantization.report import LayerSafety, QuantReport
from gym_fed.quantization.tensor_reports import gain_of, tensor_reports
from gym_fed.soup.compact import encode_compact

Model: TypeAlias = "nn.Module | str"
"""A causal LM, or a name for ``gym_fed.base.models.load_model``: ``gym-nano``, a folder, a name in the local cache."""


@dataclass(frozen=True)
class Given:
    """A model, its name and, if it was loaded by name, its tokenizer."""

    model: Any
    tokenizer: Any
    name: str

    @property
    def is_adapter(self) -> bool:
        return hasattr(self.model, "peft_config")

    def whole(self) -> Any:
        """Return the model with its adapter merged; this changes the base in place."""
        return merged(self.model)


def resolve_model(model: Model) -> Given:
    """Load a model given by name.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` or ``MODEL_INVALID``.
    """
    if isinstance(model, str):
        loaded = load_model(model, images=True)
        return Given(loaded.model, loaded.tokenizer, model_name(model))
    path = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    return Given(model, None, model_name(path) if path else type(model).__name__)


def resolve_tuned(tuned: Model, base: Model) -> Given:
    """Run ``resolve_model`` on a fine-tune; an adapter is loaded onto ``base`` if both are names.

    Raises:
        GymError: See ``load_tuned``.
    """
    if isinstance(tuned, str) and isinstance(base, str):
        loaded = load_tuned(tuned, base)
        return Given(loaded.model, loaded.tokenizer, model_name(tuned))
    return resolve_model(tuned)


def linear_aliases(model: Any) -> dict[str, str]:
    """Map ``<module>.weight`` of each linear layer to its parameter's name, which differs for a tied head."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{path}.weight": names[id(module.weight)]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) in names
    }


_MOMENT_BATCHES = 64  # more text hardly changes a mean square
_PROBE_SEQUENCES = 16


class Quantizer:
    """Writes the difference between a fine-tune and its base to a ``.gymdelta`` file, as set by ``config``.

    Raises:
        GymError: ``CONFIG_INVALID`` if calibration text or models that the config needs are missing.
    """

    def __init__(self, config: CalibratedPolicy | BitDeltaConfig | DeltaQuantConfig | None = None) -> None:
        config = CalibratedPolicy() if config is None else config
        self.config = config
        self.policy = config if isinstance(config, CalibratedPolicy) else config.policy()

    def quantize(
        self,
        base: Model,
        tuned: Model,
        *,
        out: str | Path,
        calibration: CalibrationText | None = None,
        tokenizer: Any = None,
        aligned: Model | None = None,
        unaligned: Model | None = None,
        allow_differences: bool = False,
        progress: bool = True,
    ) -> QuantReport:
        """Encode ``tuned - base``.

        Args:
            base: The model that the delta belongs to; not changed.
            tuned: The fine-tune, of the same architecture. A LoRA run is merged first; ``compact``, and a factor
                codec without a rank, keep the run's factors.
            out: The ``.gymdelta`` file; replaced if it exists.
            calibration: The contributor's own text; it stays on this machine.
            tokenizer: The base's tokenizer; required if the base is a module and calibration is text.
            aligned: For ``safety_threshold``: the safe, instruction-tuned model; by default the base.
            unaligned: For ``safety_threshold``: the model that ``aligned`` was made from; it has no default.
            allow_differences: Encode a fine-tune whose config or tokenizer differs from the base's. The
                differences are not stored in the file; the report lists them.
            progress: Show a bar on a terminal.

        Raises:
            GymError: ``CONFIG_INVALID`` if required calibration text or an unaligned model is missing,
                ``BASE_MISMATCH`` for models with different shapes or settings, ``DATA_INVALID`` for calibration
                without content, ``DELTA_INVALID`` for values that are not finite or a distillation that diverges.
        """
        policy = self.policy
        self._require(calibration, unaligned)
        given, teacher = resolve_model(base), resolve_tuned(tuned, base)
        spec = BaseSpec.of(given.model, given.name)
        old = checked_tensors(given.model, spec, "base")
        factors = self._own_factors(teacher, old)
        whole = teacher.whole()
        tokenizers = (given.tokenizer, teacher.tokenizer)
        different = require_same_settings(
            teacher.name, given.model, whole, tokenizers, allow=allow_differences, added_tokens=True
        )
        split, added = split_vocabulary(whole, old, tokenizers, teacher.name)
        target = Path(out).with_name(f".{Path(out).name}.part") if added else Path(out)
        new = checked_tensors(split, spec, "tuned")
        deltas = {name: new[name].cpu().float() - old[name].cpu().float() for name in old}
        for name, delta in deltas.items():
            energy_of(name, delta)
        batches: list[Batch] = []
        if calibration is not None and policy.calibration_samples:
            device = next(iter(old.values())).device
            batches = calibration_batches(calibration, tokenizer or given.tokenizer, policy, device)
        moments = _moments(whole, batches)
        parts = parts_of(spec.shapes, given.model)
        safety, layers = self._project(
            deltas, parts, spec, given.model if aligned is None else aligned, unaligned
        )
        distiller: Distiller | None = None
        tuned_on = old.items() if batches else ()
        better = {n: (t.float() + deltas[n].to(t.device)).to(t.dtype) for n, t in tuned_on}
        dense = {name: d for name, d in deltas.items() if name not in (factors or ()) and bool(d.any())}
        if policy.codec == "compact":
            report = encode_compact(factors or {}, dense, target, spec, policy.max_error)
        elif factors is not None:
            report = lora_delta(factors, target, spec, policy=policy, values=dense)
        else:
            with _bar("distilling scales", policy.distill_steps, progress) as on_step:
                if policy.distill_steps:
                    distiller = Distiller(policy, given.model, old, better, lambda: batches, on_step)
                report = encode_source(
                    deltas.__getitem__,
                    policy,
                    target,
                    spec,
                    importance=moments,
                    refine=distiller,
                    parts=parts,
                    sensitivity=_sensitivity(given.model, old, better, batches) if batches else None,
                    menu=MENU if policy.menu is None else policy.menu,
                )
        if added:
            info = attach_vocabulary(target, spec, added, out)
            bits = 8.0 * info.size_bytes / spec.num_parameters
            report = replace(report, sha256=info.sha256, size_bytes=info.size_bytes, bits_per_weight=bits)
        return QuantReport(
            Path(out),
            report.sha256,
            report.size_bytes,
            report.norm,
            report.bits_per_weight,
            tensor_reports(Path(out), report, deltas, moments),
            None if distiller is None else distiller.report,
            safety,
            layers,
            tuple(map(str, different)),
            str(added),
            gain_of(Path(out), given.model, old, better, batches) if batches else None,
        )

    @staticmethod
    def load(path: str | Path, base: Model | None = None) -> DeltaFile:
        """Open a delta and check it against ``base`` if given. The caller must close it.

        Raises:
            GymError: Errors from ``DeltaFile.open``.
        """
        if base is None:
            return DeltaFile.open(path, added_tokens=True)
        given = resolve_model(base)
        return DeltaFile.open(path, BaseSpec.of(given.whole(), given.name), added_tokens=True)

    @staticmethod
    def apply(base: Model, path: str | Path, scale: float = 1.0) -> Any:
        """Add ``scale`` times the delta to the base. A base given as a module is changed in place and returned.

        Raises:
            GymError: ``BASE_MISMATCH`` if the delta belongs to a different base; errors from ``DeltaFile.open``.
        """
        given = resolve_model(base)
        model = given.whole()
        with DeltaFile.open(path, BaseSpec.of(model, given.name), added_tokens=True) as delta:
            apply_delta(model, delta, scale)
        return model

    def _require(self, calibration: CalibrationText | None, unaligned: Model | None) -> None:
        policy = self.policy
        if policy.distill_steps and calibration is None:
            reason = f"distill_steps is {policy.distill_steps}, but there is no calibration text"
            raise GymError(ErrorCode.CONFIG_INVALID, reason, "pass calibration=..., or set distill_steps=0")
        weighs = policy.codec == "auto" or (
            policy.codec != "compact" and get_codec(policy.codec).weighs_inputs
        )
        if policy.calibration_samples and calibration is None and weighs:
            reason = f"calibration_samples is {policy.calibration_samples}, but there is no calibration text"
            remedy = "pass calibration=..., or set calibration_samples=0 to weight all inputs equally"
            raise GymError(ErrorCode.CONFIG_INVALID, reason, remedy)
        if policy.safety_threshold is not None and unaligned is None:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"safety_threshold is {policy.safety_threshold}, but no unaligned model was given",
                "pass unaligned=..., the model from which the aligned one was trained (aligned=... defaults to the "
                "base), or omit safety_threshold",
            )

    def _own_factors(
        self, tuned: Given, base: Mapping[str, Tensor]
    ) -> Mapping[str, tuple[Tensor, Tensor, float]] | None:
        """Return the factors of a LoRA run if the codec is ``compact``, or if it stores factors and no rank is set.

        Raises:
            GymError: ``CONFIG_INVALID`` if the rank is unset and the change has no factors.
        """
        policy = self.policy
        if policy.codec == "compact":
            keeps_factors = tuned.is_adapter and policy.safety_threshold is None
            return factors_on(tuned.model, base) if keeps_factors else None
        if policy.lora_rank is not None or policy.codec == "auto" or not get_codec(policy.codec).low_rank:
            return None
        if not tuned.is_adapter or policy.safety_threshold is not None:
            why = (
                "projects the product"
                if tuned.is_adapter
                else "is not a LoRA run, which would have its own factors"
            )
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"lora_rank is required for codec {policy.codec!r}: "
                f"{'safety_threshold' if tuned.is_adapter else tuned.name} {why}",
                "set lora_rank",
            )
        factors = factors_on(tuned.model, base)
        if not factors:
            reason = (
                f"codec {policy.codec!r}: no changed tensor of {tuned.name} is a single product of LoRA "
                "factors on this base"
            )
            raise GymError(ErrorCode.CONFIG_INVALID, reason, "set lora_rank, or choose codec dense")
        return factors

    def _project(
        self,
        deltas: dict[str, Tensor],
        parts: Mapping[str, str],
        spec: BaseSpec,
        aligned: Model,
        unaligned: Model | None,
    ) -> tuple[str, tuple[LayerSafety, ...]]:
        threshold = self.policy.safety_threshold
        if unaligned is None:
            return "not applicable: no unaligned model was given", ()
        if threshold is None:
            return "not applicable: safety_threshold is not set", ()
        safe = checked_tensors(resolve_model(aligned).whole(), spec, "aligned")
        unsafe = checked_tensors(resolve_model(unaligned).whole(), spec, "unaligned")
        layers: list[LayerSafety] = []
        for name, part in sorted(parts.items()):
            if part == "body" and deltas[name].ndim == 2:
                try:
                    projection = project_delta(
                        deltas[name], safe[name], unsafe[name], threshold, self.policy.safety_projection
                    )
                except CodecError as error:
                    raise GymError(ErrorCode.DELTA_INVALID, f"tensor {name!r}: {error}") from error
                deltas[name] = projection.delta
                layers.append(LayerSafety(name, projection.cosine, projection.replaced))
        return "applied", tuple(layers)


class BitDeltaQuantizer(Quantizer):
    """One bit per weight with distilled scales; see ``BitDeltaConfig``."""

    def __init__(self, config: BitDeltaConfig | None = None) -> None:
        super().__init__(config or BitDeltaConfig())


class DeltaQuantizer(Quantizer):
    """Quantised levels for matrices; see ``DeltaQuantConfig``."""

    def __init__(self, config: DeltaQuantConfig | None = None) -> None:
        super().__init__(config or DeltaQuantConfig())


def _moments(model: Any, batches: list[Batch]) -> dict[str, Tensor]:
    """Return input moments by parameter name; those of a tied head are under the embeddings' name."""
    if not batches:
        return {}
    spaced = batches[:: -(-len(batches) // _MOMENT_BATCHES)]
    by_module = collect_input_moments(model, plain_sequences(spaced), samples=sum(len(b.ids) for b in spaced))
    aliases = linear_aliases(model)
    return {aliases[path]: moments for path, moments in by_module.items()}


def _sensitivity(
    model: Any, base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], batches: list[Batch]
) -> Sensitivity:
    """Return a function: the divergence from the tuned model, in nats per token, if only a given tensor is encoded."""
    chosen: list[Batch] = []
    for batch in batches:
        if sum(len(b.ids) for b in chosen) < _PROBE_SEQUENCES:
            chosen.append(batch)

    def cost(name: str, decoded: Tensor) -> float:
        old = base[name]
        worse = {**tuned, name: (old.float() + decoded.to(old.device)).to(old.dtype)}
        with torch.no_grad():
            return max(0.0, divergence(model, worse, tuned, chosen, "kl"))

    return cost


@contextmanager
def _bar(description: str, steps: int, shown: bool) -> Iterator[OnStep | None]:
    """Show the progress and the loss of ``steps`` steps."""
    from gym_fed.core.progress import progress_bar

    if not (shown and steps):
        yield None
        return
    with progress_bar(description, steps, lines=False) as update:
        yield lambda step, _, loss: update(step, note=f"loss {loss:.4f}")
