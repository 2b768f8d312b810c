"""Train with torch.compile, which compiles the model at the first step and again for new shapes."""

from __future__ import annotations

import shutil
from typing import Any

from gym_fed.base.models import pick_device
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.training.features.base import Feature

_DEFAULT_BACKEND = "inductor"
_NEEDS_NO_COMPILER = ("eager", "aot_eager")


class TorchCompile(Feature):
    """Compiles the model through accelerate; the model is saved uncompiled."""

    tried = "yes; needs a compiler"

    def check(self, config: TrainingConfig) -> None:
        import torch

        backend = config.torch_compile_backend or _DEFAULT_BACKEND
        # Listing backends imports torch._dynamo, which takes seconds, so only unknown backends are looked up.
        if backend not in (_DEFAULT_BACKEND, *_NEEDS_NO_COMPILER):
            known = torch.compiler.list_backends()
            reason = f"torch_compile_backend: {backend!r} is unknown"
            remedy = f"one of {', '.join(sorted({*known, _DEFAULT_BACKEND, *_NEEDS_NO_COMPILER}))}"
            refuse_first((backend not in known, reason, remedy))
        on_cpu = pick_device(config.device).type == "cpu"
        if backend == _DEFAULT_BACKEND and on_cpu and not (shutil.which("g++") or shutil.which("c++")):
            raise GymError(
                ErrorCode.MISSING_DEPENDENCY,
                "torch_compile: inductor needs a C++ compiler on a CPU, and neither g++ nor c++ is on PATH",
                "install one, or set torch_compile_backend: aot_eager",
            )

    def arguments(self, config: TrainingConfig) -> dict[str, Any]:
        backend = config.torch_compile_backend or _DEFAULT_BACKEND
        return {"torch_compile": True, "torch_compile_backend": backend}
