"""Liger's fused Triton kernels, Hsu et al. 2024; they patch transformers' classes until the process ends."""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.requirements import require_cuda, require_package
from gym_fed.training.features.base import Feature


class Liger(Feature):
    """Sets transformers' ``use_liger_kernel``."""

    tried = "refusal only: needs CUDA"

    def check(self, config: TrainingConfig) -> None:
        require_cuda("liger: true")  # before the import, which patches transformers
        require_package("liger_kernel", "liger: true", "gpu")

    def arguments(self, config: TrainingConfig) -> dict[str, Any]:
        return {"use_liger_kernel": True}
