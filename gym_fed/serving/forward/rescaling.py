"""RWKV divides its own weights in inference; a server must not let it."""

from __future__ import annotations

from typing import Any


def keep_weights(model: Any) -> int:
    """Keep RWKV from dividing its own weights in inference, which only float16 needs; undo it if it has done so.

    Returns:
        The setting to restore; 0: none.
    """
    every = (
        getattr(model.config, "rescale_every", 0) if getattr(model.config, "model_type", "") == "rwkv" else 0
    )
    if every:
        body = model.base_model.train()
        body._rescale_layers()
        body.eval()
        model.config.rescale_every = 0
    return int(every)
