"""The base model that a variant is created on or rebased onto, with or without a delta."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gym_fed.base.models import load_model, model_name
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.chat_templates.choice import NONE, use_chat_template
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.personalization.recipe import BaseSize
from gym_fed.personalization.rows import PersonalRows


@dataclass(frozen=True)
class Base:
    """A loaded base model.

    Attributes:
        source: Name or path that it was loaded from.
        model: A causal LM in float32; unchanged outside of ``plus``.
        tokenizer: Tokenizer of the base.
        spec: Spec that deltas are checked against.
    """

    source: str
    model: Any
    tokenizer: Any
    spec: BaseSpec

    @classmethod
    def load(cls, source: str, device: str = "auto") -> Base:
        """Load a base from this machine.

        Raises:
            GymError: ``MODEL_INVALID`` for an adapter; other errors of ``load_model``.
        """
        loaded = load_model(source, device=device)
        if hasattr(loaded.model, "peft_config"):
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{source}: is an adapter, and variants are of whole models",
                "give its base model, or merge it: Trainer.export(format='huggingface')",
            )
        return cls(source, loaded.model, loaded.tokenizer, BaseSpec.of(loaded.model, model_name(source)))

    @property
    def context(self) -> int | None:
        """Context length in tokens; None if the config has none."""
        length = getattr(self.model.config, "max_position_embeddings", None)
        return int(length) if length else None

    @property
    def size(self) -> BaseSize:
        """The properties of the base that determine a variant's defaults."""
        return BaseSize(self.context, self.spec.num_parameters)

    @contextmanager
    def plus(self, delta: DeltaFile, scale: float = 1.0) -> Iterator[Any]:
        """Add ``scale * delta`` inside this context; the exact base is restored afterwards."""
        tensors = model_tensors(self.model)
        originals = {name: tensors[name].clone() for name in delta.names if name in tensors}
        try:
            apply_delta(self.model, delta, scale)
            yield self.model
        finally:
            with torch.no_grad():
                for name, tensor in originals.items():
                    tensors[name].copy_(tensor)

    def for_rows(self, rows: PersonalRows) -> Base:
        """Return the base with the tokenizer used to train and evaluate these rows."""
        return replace(self, tokenizer=use_chat_template(self.tokenizer, NONE)) if rows.raw else self

    def opened(self, path: Path) -> DeltaFile:
        """Open and check a delta of this base. The caller must close it.

        Raises:
            GymError: Errors of ``DeltaFile.open``.
        """
        return DeltaFile.open(path, self.spec)
