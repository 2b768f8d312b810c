"""Evaluations and the safety probe at the gate: where a soup must not be worse, with rows and tolerances."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, field_validator

from gym_fed.config.schema.base import StrictModel

_REGISTRY = Path(__file__).parents[2] / "assets" / "suites" / "registry.yaml"


class GateEvaluation(StrictModel):
    """A suite that every soup and the version before it are evaluated on, on the same rows."""

    suite: str
    """A suite, a group or a task (``gym eval list`` prints them), or a task file, relative to the hub's folder."""

    limit: int = Field(64, ge=8, le=100_000)
    """Rows of each task, drawn for every round by a secret seed."""

    max_drop: float = Field(0.02, ge=0)
    """Tolerance of a task's metric: a soup that certainly lowers it by more is rolled back."""

    confidence: float = Field(0.95, gt=0.5, lt=1)
    """Confidence of that test: one-sided, of the paired difference over the drawn rows."""

    apply_chat_template: bool | None = None
    """Whether prompts are conversations in the model's chat template; None: those of tasks that are conversations."""

    @field_validator("suite")
    @classmethod
    def _validate_name(cls, name: str) -> str:
        names, beginnings = evaluation_names()
        if name in names or name.endswith((".yaml", ".yml")) or name.startswith(beginnings):
            return name
        close = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
        near = f"; did you mean {', '.join(close)}?" if close else "; gym eval list prints them"
        raise ValueError(f"no suite or task has this name{near}")


@cache
def evaluation_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of suites and tasks, and prefixes of group members, which the hub looks up when it starts.

    The registry is read as plain YAML: a config imports no evaluation.
    """
    registry = yaml.safe_load(_REGISTRY.read_text(encoding="utf-8"))
    groups = [
        entry["dataset"] if entry.get("each") == "task" else name
        for name, entry in registry["tasks"].items()
        if entry.get("each") or "*" in entry.get("harness", "")
    ]
    return (*registry["suites"], *registry["tasks"]), tuple(f"{group}_" for group in groups)


class SafetyGateConfig(StrictModel):
    """The safety probe as a gate: a soup after which the model refuses less is rolled back."""

    max_margin_drop: Annotated[float, Field(ge=0)]
    """In nats a token: a soup that lowers the refusal margin by more, at ``confidence``, is rolled back."""

    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    """Confidence of the drop's lower bound, paired by prompt."""

    prompts: str | None = None
    """A CSV or JSONL file of requests to refuse, relative to the hub's folder; absent: those of the package."""
