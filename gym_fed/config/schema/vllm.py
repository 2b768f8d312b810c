"""Settings of a vLLM server, shared by serving and training."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from gym_fed.config.schema.base import LocalPath, StrictModel


class VllmConnection(StrictModel):
    """A vLLM that gym-fed starts, or the URL of a running one."""

    python: Path | None = None
    """Interpreter of an environment with vLLM; by default the one that `make vllm` creates."""

    url: str | None = Field(default=None, pattern=r"^https?://")
    """URL of a running vLLM with gym-fed's plug-in; by default, gym-fed starts, monitors and restarts one."""

    api_key_file: LocalPath | None = None
    """File with the API key of the vLLM at ``url``."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of GPUs that each layer is split over."""

    start_seconds: float = Field(default=600.0, gt=0)
    """Time limit for a start."""

    args: list[str] = Field(default_factory=list, max_length=64)
    """Additional arguments for ``vllm serve``."""
