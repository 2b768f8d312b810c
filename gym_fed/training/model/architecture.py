"""The architecture of a run's model, read from its config before its weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from gym_fed.base.models import resolve
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.core.json_files import read_object

_MAX_BASES = 4
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


def known_architecture(config: TrainingConfig) -> Any | None:
    """Return the ``transformers`` config of the model that a run names; for an adapter, of its base.

    Returns:
        None where there is no model on this machine, or its config cannot be read: loading the model reports that.
    """
    from transformers import AutoConfig

    try:
        if config.model_init is not None:
            from gym_fed.training.model.loading import scratch_config

            return scratch_config(config.model_init)
        if config.model is None:
            return None
        folder = Path(resolve(config.model))
        for _ in range(_MAX_BASES):
            if (folder / "config.json").is_file():
                return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            adapter = read_object(folder / "adapter_config.json")
            folder = Path(resolve(str(adapter["base_model_name_or_path"])))
    except (GymError, StrictDataclassError, *_UNREADABLE):
        pass  # reported by loading
    return None
