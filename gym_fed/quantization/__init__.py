"""Fine-tunes as small delta files: BitDelta and DeltaQuant. Names are imported on first use.

report = BitDeltaQuantizer(BitDeltaConfig(group_size="row")).quantize(
    base="gym-nano", tuned="runs/mine", calibration=rows, out="mine.gymdelta"
)
model = BitDeltaQuantizer.apply("gym-nano", "mine.gymdelta")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.quantization.bitdelta import BitDeltaQuantizer
    from gym_fed.quantization.config import BitDeltaConfig, DeltaQuantConfig, QuantMethod
    from gym_fed.quantization.deltaquant import DeltaQuantizer
    from gym_fed.quantization.refining import distiller
    from gym_fed.quantization.report import DistillReport, LayerSafety, QuantizedTensor, QuantReport

__all__ = [
    "BitDeltaConfig",
    "BitDeltaQuantizer",
    "DeltaQuantConfig",
    "DeltaQuantizer",
    "DistillReport",
    "LayerSafety",
    "QuantMethod",
    "QuantReport",
    "QuantizedTensor",
    "distiller",
]

__getattr__ = lazy(
    __name__,
    BitDeltaConfig="gym_fed.quantization.config",
    BitDeltaQuantizer="gym_fed.quantization.bitdelta",
    DeltaQuantConfig="gym_fed.quantization.config",
    DeltaQuantizer="gym_fed.quantization.deltaquant",
    DistillReport="gym_fed.quantization.report",
    LayerSafety="gym_fed.quantization.report",
    QuantMethod="gym_fed.quantization.config",
    QuantReport="gym_fed.quantization.report",
    QuantizedTensor="gym_fed.quantization.report",
    distiller="gym_fed.quantization.refining",
)
