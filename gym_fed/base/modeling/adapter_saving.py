"""Save adapters in PEFT's format with a base name that can be loaded, and convert their dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.adapter_base import record_base
from gym_fed.base.modeling.adapters import WEIGHTS
from gym_fed.base.models import folder_here


def save_adapter(model: Any, folder: Path, base_name: str | None) -> None:
    """Save the adapter in PEFT's format, with a base name that can be loaded independently of the base's location."""
    model.save_pretrained(str(folder), save_embedding_layers=False)
    name_base(folder, base_name)


def name_base(folder: Path, base_name: str | None) -> None:
    """Write the base's name into an adapter's config, and its digest next to it; delete PEFT's model card."""
    (folder / "README.md").unlink(missing_ok=True)
    if base_name is not None:
        file = folder / "adapter_config.json"
        values = json.loads(file.read_text(encoding="utf-8"))
        values["base_model_name_or_path"] = base_name
        file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        record_base(folder, folder_here(base_name))


def cast_adapter(folder: Path, dtype: str) -> None:
    """Convert the floating-point tensors of an adapter to another type."""
    import torch
    from safetensors.torch import load_file, save_file

    target, file = getattr(torch, dtype), folder / WEIGHTS
    tensors = load_file(file)
    cast = {n: value.to(target) if value.is_floating_point() else value for n, value in tensors.items()}
    save_file(cast, file, metadata={"format": "pt"})
