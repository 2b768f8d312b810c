"""BitDelta as a whole: signs and scales for matrices, a codec of their own for embeddings, head and norms.

Liu et al. 2024, "BitDelta: Your Fine-Tune May Only Be Worth One Bit". The paper keeps embeddings, head and norms
whole; here they are encoded as well, so that a variant of a small or tied model is small too.
"""

from __future__ import annotations

from typing import Any

from gym_quant import get_codec
from torch import Tensor

from gym_fed.quantization.config import BitDeltaConfig
from gym_fed.quantization.quantizer import Plan, Quantizer, Work, end_plan


class BitDeltaQuantizer(Quantizer[BitDeltaConfig]):
    """One bit a weight, and scales that are distilled. See ``BitDeltaConfig``."""

    def __init__(self, config: BitDeltaConfig | None = None) -> None:
        super().__init__(config or BitDeltaConfig())

    def plan(self, work: Work) -> dict[str, Plan]:
        config, plans = self.config, {}
        for name, delta in work.deltas.items():
            shape, kind = tuple(delta.shape), work.kinds[name]
            if kind == "embedding":
                plans[name] = end_plan(
                    config.embeddings, shape, config.scale_dtype, "embedding or head: embeddings"
                )
            elif kind == "small":
                plans[name] = end_plan(config.norms, shape, config.scale_dtype, "one-dimensional: norms")
            else:
                wanted: dict[str, Any] = {"scale_dtype": config.scale_dtype, "group_size": config.group_size}
                if config.group_size == "row":
                    wanted["group_size"] = shape[-1]
                plans[name] = Plan(
                    "bitdelta", get_codec("bitdelta").normalise(wanted, shape), "matrix: bitdelta"
                )
        return plans

    def importance(self, plan: Plan, moments: Tensor | None) -> dict[str, Tensor]:
        """None: signs and the mean magnitude are the paper's, and distillation does the rest."""
        return {}
