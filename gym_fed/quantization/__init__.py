"""Encode fine-tunes as small delta files (BitDelta, DeltaQuant) and merge them. Names are imported on first use.

report = BitDeltaQuantizer(BitDeltaConfig(group_size="row")).quantize(
    base="gym-nano", tuned="runs/mine", calibration=rows, out="mine.gymdelta"
)
model = BitDeltaQuantizer.apply("gym-nano", "mine.gymdelta")

soup = DeltaSoup(DeltaSoupConfig(base_model="gym-nano", method=AggregationMethod.BYZANTINE_ROBUST))
result = soup.contribute(user_id="ada", model="mine.gymdelta").contribute(...).aggregate(min_contributors=3)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.config.hub.soup import AggregationMethod as AggregationMethod
    from gym_fed.config.hub.soup import DeltaSoupConfig as DeltaSoupConfig
    from gym_fed.quantization.config import BitDeltaConfig as BitDeltaConfig
    from gym_fed.quantization.config import CalibratedPolicy as CalibratedPolicy
    from gym_fed.quantization.config import DeltaQuantConfig as DeltaQuantConfig
    from gym_fed.quantization.config import QuantMethod as QuantMethod
    from gym_fed.quantization.quantizer import BitDeltaQuantizer as BitDeltaQuantizer
    from gym_fed.quantization.quantizer import DeltaQuantizer as DeltaQuantizer
    from gym_fed.quantization.quantizer import Quantizer as Quantizer
    from gym_fed.quantization.refining import distiller as distiller
    from gym_fed.quantization.report import DistillReport as DistillReport
    from gym_fed.quantization.report import LayerSafety as LayerSafety
    from gym_fed.quantization.report import QuantizedTensor as QuantizedTensor
    from gym_fed.quantization.report import QuantReport as QuantReport
    from gym_fed.soup.delta_soup import DeltaSoup as DeltaSoup
    from gym_fed.soup.delta_soup import SoupResult as SoupResult

__all__, __getattr__ = lazy(__name__)
