"""Measure the error of a written delta for every tensor, in weights and outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from gym_quant.calibration import output_error
from torch import Tensor

from gym_fed.delta.encode import EncodeReport, TensorReport, energy_of
from gym_fed.delta.file import DeltaFile
from gym_fed.quantization.report import QuantizedTensor


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


def _relative(delta: Tensor, decoded: Tensor, weights: Tensor | None) -> float:
    whole = output_error(delta, torch.zeros_like(delta), weights)
    return math.sqrt(output_error(delta, decoded, weights) / whole) if whole else 0.0
