"""How a run goes: where it is kept, how often it is saved and logged, and when it stops."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from gym_fed.config.base import StrictModel
from gym_fed.config.compute import Dtype


class RunSections(StrictModel):
    """Keys of the YAML's top level."""

    output_dir: Path = Path("runs/train")
    """Where config, metrics, checkpoints and the result go; relative to the working directory."""

    seed: int = 0
    logging_steps: int = Field(default=10, ge=1)
    save_steps: int = Field(default=0, ge=0)
    """A checkpoint every so many steps; 0 saves one only when interrupted."""

    save_total_limit: int = Field(default=1, ge=1)
    """How many checkpoints are kept."""

    save_final: bool = True
    """Write the trained model (or adapter) into ``output_dir`` at the end."""

    save_dtype: Dtype | None = None
    """Type of the weights on disk at the end; by default the one they were trained in."""
