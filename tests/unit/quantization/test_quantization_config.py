"""Settings of the quantisers: what they accept, refuse and default to."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from gym_fed.quantization import BitDeltaConfig, DeltaQuantConfig, QuantMethod


def test_the_defaults_are_those_of_the_documentation() -> None:
    bitdelta, deltaquant = BitDeltaConfig(), DeltaQuantConfig()
    assert (bitdelta.bits, bitdelta.group_size, bitdelta.max_length) == (1, None, 128)
    assert (deltaquant.method, deltaquant.per_channel) == (QuantMethod.INT4, True)
    assert deltaquant.calibration_samples == 256
    assert {method.value for method in QuantMethod} == {"int2", "int4", "int8", "binary", "ternary"}


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (BitDeltaConfig, {"bits": 2}, "bits"),
        (BitDeltaConfig, {"group_size": 4}, "group_size"),
        (BitDeltaConfig, {"group_size": "column"}, "group_size"),
        (BitDeltaConfig, {"distil_steps": 5}, "distil_steps"),
        (BitDeltaConfig, {"embeddings": "int3"}, "embeddings"),
        (BitDeltaConfig, {"safety_threshold": 1.5}, "safety_threshold"),
        (BitDeltaConfig, {"calibration_samples": 0}, "calibration_samples above 0"),
        (BitDeltaConfig, {"distill_steps": 0, "distill_bits": True}, "distill_bits"),
        (BitDeltaConfig, {"distill_lr": float("nan")}, "distill_lr"),
        (DeltaQuantConfig, {"per_channel": False, "group_size": 32}, "per_channel: true"),
        (DeltaQuantConfig, {"method": "int3"}, "method"),
        (DeltaQuantConfig, {"max_bits_per_weight": 0}, "max_bits_per_weight"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(
    config: type[BitDeltaConfig | DeltaQuantConfig], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**values)


def test_settings_do_not_change_once_made() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        BitDeltaConfig().group_size = 64


def test_the_settings_load_without_torch() -> None:
    code = (
        "import sys; from gym_fed.quantization import BitDeltaConfig, DeltaQuantConfig, QuantMethod;"
        "BitDeltaConfig(); DeltaQuantConfig(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
