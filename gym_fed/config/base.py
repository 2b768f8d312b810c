"""The base class of every config schema: unknown keys are refused, values are frozen after validation."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A schema that knows all its keys. ``use_attribute_docstrings`` turns docstrings into field help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
