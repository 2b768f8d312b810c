"""Butterfly orthogonal fine-tuning: learn a rotation as a product of sparse factors.

Liu et al. 2023, "Parameter-Efficient Orthogonal Finetuning via Butterfly Factorization".
"""

from __future__ import annotations

import warnings
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.requirements import require_cuda, require_package
from gym_fed.training.tuning.base import Tuning, refuse_quantization


class Boft(Tuning):
    """BOFT: ``(B_m ... B_1) W`` with butterfly factors B; PEFT's CPU path needs no compiler."""

    tried = "learning, saving, bit-exact resume; one butterfly factor"
    untried = "more factors: they need CUDA and a compiler"

    on_quantized = False

    def check(self, config: TrainingConfig) -> None:
        refuse_quantization(config, "PEFT has no BOFT layers for quantised weights")
        assert config.boft is not None  # set by the config
        if config.boft.boft_n_butterfly_factor > 1:
            require_cuda("boft.boft_n_butterfly_factor above 1: PEFT's kernel for it")
            require_package("ninja", "boft.boft_n_butterfly_factor above 1: PEFT's kernel for it", "gpu")

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        from peft import BOFTConfig

        from gym_fed.training.model.peft_models import peft_arguments, wrap_for

        assert config.boft is not None  # set by the config
        peft_config = BOFTConfig(**peft_arguments(config))
        with warnings.catch_warnings():
            if config.boft.boft_n_butterfly_factor == 1:  # this value needs no kernel
                warnings.filterwarnings("ignore", message="Failed to load the CUDA extension|Setting boft_n")
            else:
                warnings.filterwarnings("error", message="Setting boft_n")
            return wrap_for(model, peft_config, config)
