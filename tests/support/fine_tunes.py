"""Fine-tunes of small models that were never trained: the base plus noise."""

from __future__ import annotations

from pathlib import Path

import torch

from gym_fed.base.models import load_model
from gym_fed.delta.base import model_tensors


def save_noisy_copy(base: Path, folder: Path, unchanged: str = "none") -> Path:
    """Save ``base`` plus noise, except in tensors whose names contain ``unchanged``."""
    model = load_model(str(base))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model_tensors(model.model).items():
            if unchanged not in name:
                tensor.add_(1e-2 * torch.randn(tensor.shape, generator=generator))
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder
