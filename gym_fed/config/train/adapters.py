"""Settings of the adapters that a run starts from, and of the reference that its policy is compared with."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from gym_fed.config.schema.base import StrictModel


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Folders = Annotated[list[str], BeforeValidator(_listed)]
"""One or more folders of PEFT adapters, in the order in which they are applied."""


class AdapterSections(StrictModel):
    """Keys of the YAML's top level."""

    adapter: Folders = Field(default_factory=list)
    """Adapters of ``model`` to start from: folders, finished runs or cached names. All but the last are merged into the
    model, and the last is trained on. Under ``full`` and ``freeze`` all are merged."""

    new_adapter: bool = False
    """Merge all of ``adapter`` into the model and train a new adapter on the result."""

    reference_model: str | None = None
    """The model that the algorithm compares the policy with; by default the model before training."""

    reference_adapter: Folders = Field(default_factory=list)
    """Adapters of the reference, merged into ``reference_model``, or into ``model`` where that is not given."""

    @model_validator(mode="after")
    def _validate_adapters(self) -> AdapterSections:
        if self.new_adapter and not self.adapter:
            raise ValueError(
                "new_adapter: adapter names nothing to start from; every run trains a new one then"
            )
        for key in ("adapter", "reference_adapter"):
            named = getattr(self, key)
            if len(set(named)) != len(named):
                raise ValueError(f"{key}: an adapter is named twice")
        return self
