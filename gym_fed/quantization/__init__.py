"""Fine-tunes as small delta files, BitDelta and DeltaQuant, and the soup of many. Names are imported on first use.

report = BitDeltaQuantizer(BitDeltaConfig(group_size="row")).quantize(
    base="gym-nano", tuned="runs/mine", calibration=rows, out="mine.gymdelta"
)
model = BitDeltaQuantizer.apply("gym-nano", "mine.gymdelta")

soup = DeltaSoup(DeltaSoupConfig(base_model="gym-nano", method=AggregationMethod.BYZANTINE_ROBUST))
result = soup.contribute(user_id="ada", model="mine.gymdelta").contribute(...).aggregate(min_contributors=3)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.config.delta_soup import DeltaSoupConfig
    from gym_fed.config.soup import AggregationMethod
    from gym_fed.quantization.bitdelta import BitDeltaQuantizer
    from gym_fed.quantization.config import BitDeltaConfig, DeltaQuantConfig, QuantMethod
    from gym_fed.quantization.deltaquant import DeltaQuantizer
    from gym_fed.quantization.refining import distiller
    from gym_fed.quantization.report import DistillReport, LayerSafety, QuantizedTensor, QuantReport
    from gym_fed.soup.delta_soup import DeltaSoup, SoupResult

__all__ = [
    "AggregationMethod",
    "BitDeltaConfig",
    "BitDeltaQuantizer",
    "DeltaQuantConfig",
    "DeltaQuantizer",
    "DeltaSoup",
    "DeltaSoupConfig",
    "DistillReport",
    "LayerSafety",
    "QuantMethod",
    "QuantReport",
    "QuantizedTensor",
    "SoupResult",
    "distiller",
]

__getattr__ = lazy(
    __name__,
    AggregationMethod="gym_fed.config.soup",
    BitDeltaConfig="gym_fed.quantization.config",
    BitDeltaQuantizer="gym_fed.quantization.bitdelta",
    DeltaQuantConfig="gym_fed.quantization.config",
    DeltaQuantizer="gym_fed.quantization.deltaquant",
    DeltaSoup="gym_fed.soup.delta_soup",
    DeltaSoupConfig="gym_fed.config.delta_soup",
    DistillReport="gym_fed.quantization.report",
    LayerSafety="gym_fed.quantization.report",
    QuantMethod="gym_fed.quantization.config",
    QuantReport="gym_fed.quantization.report",
    QuantizedTensor="gym_fed.quantization.report",
    SoupResult="gym_fed.soup.delta_soup",
    distiller="gym_fed.quantization.refining",
)
