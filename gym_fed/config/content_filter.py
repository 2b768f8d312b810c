"""`filter` of `serving.yaml`: which requests and answers are refused, by rules and by a classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from gym_fed.config.schema.base import StrictModel

CATEGORY = r"[a-z0-9][a-z0-9_-]{0,31}"
"""Names of categories: they are labels of metrics, and stand in logs."""

Category = Annotated[str, StringConstraints(pattern=f"^{CATEGORY}$")]
Side = bool | Annotated[list[Category], Field(min_length=1)]


class FilterConfig(StrictModel):
    """The content filter of chat and completions. Off, unless ``input`` or ``output`` is on."""

    input: Side = False
    """Whether requests are compared with the rules: true, or the categories that are."""

    output: Side = False
    """Whether answers are. A stream is held back by as many characters as the longest rule can match."""

    package_rules: bool = True
    """Whether the small list of the package is used."""

    rules: list[Path] = Field(default_factory=list, max_length=32)
    """Rule files of your own, read when the server starts."""

    text: str = Field(default="This request or its answer was refused by a content filter.", min_length=1)
    """Answered in place of what is refused."""

    @model_validator(mode="after")
    def _used(self) -> FilterConfig:
        if not self.on and self.model_fields_set - {"input", "output"}:
            raise ValueError("neither input nor output is on, so nothing is filtered: set one of them")
        if self.on and not (self.rules or self.package_rules):
            raise ValueError("there are no rules: give rules, or package_rules: true")
        return self

    @property
    def on(self) -> bool:
        return bool(self.input or self.output)
