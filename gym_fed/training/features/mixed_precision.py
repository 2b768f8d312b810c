"""Mixed precision, Micikevicius et al. 2018: matrix products in 16 bits, weights and sums in float32."""

from __future__ import annotations

from typing import Any

from gym_fed.base.models import pick_device
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.training.features.base import Feature


class MixedPrecision(Feature):
    """Uses torch's autocast through accelerate; ``fp16`` also scales the loss."""

    tried = "bf16; refusal of fp16, which needs CUDA"

    def check(self, config: TrainingConfig) -> None:
        import torch

        device = pick_device(config.device)
        # transformers accepts fp16 on a CPU, but computes in float32.
        lacks_bf16 = device.type == "cuda" and not torch.cuda.is_bf16_supported()
        is_fp16 = config.mixed_precision == "fp16"
        needs_cuda = f"fp16 needs a CUDA GPU, but this run is on {device.type}"
        unsupported = "this GPU does not support bf16"
        refuse_first(
            (is_fp16 and device.type != "cuda", needs_cuda, "use mixed_precision: bf16, or no"),
            (not is_fp16 and lacks_bf16, unsupported, "use mixed_precision: fp16, or no"),
            prefix="mixed_precision: ",
        )

    def arguments(self, config: TrainingConfig) -> dict[str, Any]:
        return {config.mixed_precision: True}
