"""Where TRL's trainers are bent to our promises: no telemetry, no model cards, no patches left on the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl import SFTTrainer


class LocalOnly:
    """Mix-in, placed before a TRL trainer: it sends nothing anywhere and writes no README into checkpoints.

    TRL reports each construction of a trainer to the hub unless told otherwise. A method is overridden rather
    than an environment variable set, because the variable is read only when huggingface_hub is first imported.
    """

    def _send_telemetry(self) -> None:
        """Nothing leaves this machine."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: our own run folder says what was trained."""


class LocalSFTTrainer(LocalOnly, SFTTrainer):
    """TRL's ``SFTTrainer`` without side effects."""


@contextmanager
def unpatched_afterwards(model: Any) -> Iterator[None]:
    """Give ``model`` its own ``forward`` and ``use_cache`` back: TRL replaces both and leaves them so."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    missing = object()
    before = base.__dict__.get("forward", missing)
    use_cache = base.config.use_cache
    try:
        yield
    finally:
        base.config.use_cache = use_cache
        if before is missing:
            base.__dict__.pop("forward", None)
        else:
            base.__dict__["forward"] = before
