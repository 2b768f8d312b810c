"""Put the model on the device of this process."""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.processes.pipeline import cut_into_stages
from gym_fed.training.processes.sequence_parallel import require_splittable
from gym_fed.training.processes.sharding import is_placed

__all__ = ["cut_into_stages", "place"]


def place(model: Any, config: TrainingConfig, device: Any) -> Any:
    """Return a loaded causal LM on its device.

    Raises:
        GymError: ``MODEL_INVALID`` if its rows shall be split over processes and cannot be.
    """
    model = model if is_placed(model, config) else model.to(device)
    require_splittable(model, config)
    return model
