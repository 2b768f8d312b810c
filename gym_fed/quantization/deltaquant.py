"""DeltaQuant as a whole: int8 to binary levels, calibrated by the layers' inputs, by one method or by a budget."""

from __future__ import annotations

from typing import Any

from gym_quant import get_codec
from torch import Tensor

from gym_fed.errors import ErrorCode, GymError
from gym_fed.quantization.config import DeltaQuantConfig, QuantMethod
from gym_fed.quantization.mixed import assign_bits
from gym_fed.quantization.quantizer import Plan, Quantizer, Work, end_plan

_BY_SIZE = (QuantMethod.BINARY, QuantMethod.TERNARY, QuantMethod.INT2, QuantMethod.INT4, QuantMethod.INT8)
_CALIBRATED = {method.value for method in QuantMethod}


class DeltaQuantizer(Quantizer[DeltaQuantConfig]):
    """Levels for matrices. See ``DeltaQuantConfig``."""

    def __init__(self, config: DeltaQuantConfig | None = None) -> None:
        super().__init__(config or DeltaQuantConfig())

    def plan(self, work: Work) -> dict[str, Plan]:
        config = self.config
        if config.calibration_samples and not work.batches:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"calibration_samples is {config.calibration_samples}, but there is no calibration text",
                "pass calibration=..., or set calibration_samples=0 to weigh all inputs alike",
            )
        fixed: dict[str, Plan] = {}
        options: dict[str, list[Plan]] = {}
        for name, delta in work.deltas.items():
            shape, kind = tuple(delta.shape), work.kinds[name]
            if kind == "small":
                fixed[name] = end_plan(config.norms, shape, config.scale_dtype, "one-dimensional: norms")
            elif kind == "embedding" and config.embeddings != "same":
                fixed[name] = end_plan(
                    config.embeddings, shape, config.scale_dtype, "embedding or head: embeddings"
                )
            elif config.max_bits_per_weight is None:
                fixed[name] = self._matrix(config.method, shape, f"matrix: {config.method.value}")
            else:
                allowed = _BY_SIZE[: _BY_SIZE.index(config.method) + 1]
                options[name] = [self._matrix(method, shape, "budget") for method in allowed]
        if config.max_bits_per_weight is None:
            return fixed
        if not work.batches:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                "max_bits_per_weight assigns bits by measured sensitivity, but calibration_samples is 0",
                "pass calibration=... and set calibration_samples, or drop max_bits_per_weight",
            )
        return {**fixed, **assign_bits(work, fixed, options, config.max_bits_per_weight, self.importance)}

    def importance(self, plan: Plan, moments: Tensor | None) -> dict[str, Tensor]:
        """Input channels that carry more count more."""
        return {} if moments is None or plan.codec not in _CALIBRATED else {"importance": moments}

    def _matrix(self, method: QuantMethod, shape: tuple[int, ...], why: str) -> Plan:
        config = self.config
        wanted: dict[str, Any] = {"scale_dtype": config.scale_dtype, "symmetric": config.symmetric}
        if config.per_channel:
            wanted["group_size"] = config.group_size or shape[-1]
        return Plan(method.value, get_codec(method.value).normalise(wanted, shape), why)
