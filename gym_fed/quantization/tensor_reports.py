"""Measure the error of a written delta for every tensor, in weights and outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gym_quant.calibration import output_error
from gym_quant.distill import Batch, next_token_loss
from torch import Tensor

from gym_fed.delta.encode import EncodeReport, TensorReport, energy_of
from gym_fed.delta.file import DeltaFile
from gym_fed.quantization.report import GainReport, QuantizedTensor

_GAIN_SEQUENCES = 64


def tensor_reports(
    path: Path, report: EncodeReport, deltas: Mapping[str, Tensor], moments: Mapping[str, Tensor]
) -> tuple[QuantizedTensor, ...]:
    """Report every tensor of the base, with the errors of the decoded file."""
    encoded = {tensor.name: tensor for tensor in report.tensors}
    reports: list[QuantizedTensor] = []
    with DeltaFile.open(path, added_tokens=True) as file:
        for name, delta in sorted(deltas.items()):
            tensor = encoded.get(name, TensorReport(name, None, "unchanged", 0, 0.0))
            weights = [None, moments[name]] if name in moments else [None]
            if name not in file:  # the whole change is missing, if there is one
                lost = 1.0 if bool(delta.any()) else 0.0
                energy = energy_of(name, delta)
                output = lost if len(weights) > 1 else None
                reports.append(QuantizedTensor(name, None, {}, tensor.why, 0, energy, 0.0, lost, output))
                continue
            decoded = file.decode(name)
            errors = [_relative(delta, decoded, weight) for weight in weights]
            reports.append(
                QuantizedTensor(
                    name,
                    tensor.codec,
                    file.record(name).params,
                    tensor.why,
                    tensor.payload_bytes,
                    tensor.energy,
                    8.0 * tensor.payload_bytes / delta.numel(),
                    errors[0],
                    errors[1] if len(errors) > 1 else None,
                )
            )
    return tuple(reports)


def gain_of(
    path: Path, model: Any, base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], batches: Sequence[Batch]
) -> GainReport:
    """Measure the losses of base, fine-tune and file on up to 64 evenly spaced sequences.

    Args:
        path: The ``.gymdelta``.
        model: A model of the base's architecture; its weights are not used.
        base: Tensors of the base by name.
        tuned: Tensors of the fine-tune by name.
        batches: The calibration text, at least one batch.
    """
    step = -(-sum(len(batch.ids) for batch in batches) // _GAIN_SEQUENCES)
    chosen = batches[::step]
    with DeltaFile.open(path, added_tokens=True) as file:
        decoded = {
            name: (t.float() + file.decode(name).to(t.device)).to(t.dtype) if name in file else t
            for name, t in base.items()
        }
    was_training = model.training
    model.eval()
    try:
        return GainReport(*(next_token_loss(model, weights, chosen) for weights in (base, tuned, decoded)))
    finally:
        model.train(was_training)


def _relative(delta: Tensor, decoded: Tensor, weights: Tensor | None) -> float:
    whole = output_error(delta, torch.zeros_like(delta), weights)
    return math.sqrt(output_error(delta, decoded, weights) / whole) if whole else 0.0
