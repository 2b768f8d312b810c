"""Fine-tunes with added tokens or a padded vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken

from gym_fed.base.models import load_model


def save_with_tokens(
    base: Path, folder: Path, tokens: list[str], *, rows: int | None = None, seed: int = 0
) -> Any:
    """Save a noisy copy of ``base`` with added tokens (special if in ``<|...|>``) and ``rows`` embedding rows.

    Returns:
        The fine-tune's model; its new rows are random.
    """
    loaded = load_model(str(base))
    model: Any = loaded.model
    tokenizer = loaded.tokenizer
    for token in tokens:
        special = token.startswith("<|")
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)], special_tokens=special)
    old = len(model.get_input_embeddings().weight)
    size = rows or max(old, len(tokenizer))
    model.resize_token_embeddings(size, mean_resizing=False)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight[old:] = torch.randn_like(module.weight[old:])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
