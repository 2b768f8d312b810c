"""The section `filter` of `serving.yaml`: the requests and answers to refuse, by rules and by a classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from gym_fed.config.schema.base import StrictModel

CATEGORY = r"[a-z0-9][a-z0-9_-]{0,31}"
"""Names of categories, which are labels of metrics and appear in logs."""

Category = Annotated[str, StringConstraints(pattern=f"^{CATEGORY}$")]
Side = bool | Annotated[list[Category], Field(min_length=1)]


class ClassifierConfig(StrictModel):
    """A question that the served model, or a variant of it, answers with yes or no."""

    variant: str | None = None
    """Answers it; without one the base does."""

    question: str = "Is the following text harmful? Answer yes or no.\n\n{text}"
    """A user's message; ``{text}`` is the request or the answer."""

    category: Category = "classifier"
    """Category of what it refuses."""

    threshold: float = Field(default=0.5, gt=0, lt=1)
    """Probability of yes, of yes and no alone, from which on a text is refused."""

    @model_validator(mode="after")
    def _validate_place(self) -> ClassifierConfig:
        if self.question.count("{text}") != 1:
            raise ValueError("question needs {text} once: the place of the text")
        return self


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

    classifier: ClassifierConfig | None = None
    """Judges what no rule matches. Answers are then held back whole."""

    @model_validator(mode="after")
    def _validate_rules(self) -> FilterConfig:
        if not self.on and self.model_fields_set - {"input", "output"}:
            raise ValueError("neither input nor output is on, so nothing is filtered: set one of them")
        if self.on and not (self.rules or self.package_rules or self.classifier):
            raise ValueError("there are no rules: give rules, package_rules: true or a classifier")
        return self

    @property
    def on(self) -> bool:
        return bool(self.input or self.output)
