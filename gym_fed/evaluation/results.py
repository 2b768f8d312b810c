"""Results of an evaluation: figures with their errors, and every sample that they came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_fed.core.files import write_atomically


@dataclass(frozen=True)
class Figure:
    """One metric of one task.

    Attributes:
        value: Mean over the samples, as the metric defines it.
        stderr: Standard error of ``value``; None where it has none.
        num_samples: How many samples it is of.
        higher_is_better: Which way is better.
    """

    value: float
    stderr: float | None
    num_samples: int
    higher_is_better: bool = True


@dataclass(frozen=True)
class SampleResult:
    """One row of a task under one model: what was given, what came back, what it was worth.

    Attributes:
        number: Of the row in its task's split, from 0.
        row_sha256: Digest of the row, so that two runs can be paired by it.
        prompt: As the model got it, or its beginning; never absent.
        choices: Continuations that were scored; empty for a generation.
        logprobs: Of ``choices``, in nats.
        answer: The generated text; None for scored choices.
        token_ids: Of ``answer``.
        target: What is right.
        metrics: The sample's values by metric.
        cut: Tokens of the prompt that did not fit.
        margins: See ``scoring.scorer.AnswerResult``.
    """

    number: int
    row_sha256: str
    prompt: str
    choices: tuple[str, ...]
    logprobs: tuple[float, ...]
    answer: str | None
    token_ids: tuple[int, ...]
    target: str
    metrics: Mapping[str, float]
    cut: int = 0
    margins: tuple[float, ...] = ()


@dataclass(frozen=True)
class TaskResult:
    """One task under one model.

    Attributes:
        task: Name.
        version: Of the task's definition, as its author counts.
        num_fewshot: Examples that every prompt began with.
        figures: By metric.
        samples: Every one, in the order of ``number``.
        lock: Digests of task definition and data: what another must have to reproduce it.
        chat_template: Whether its prompts were put into the model's template.
    """

    task: str
    version: str
    num_fewshot: int
    figures: Mapping[str, Figure]
    samples: tuple[SampleResult, ...]
    lock: str
    chat_template: bool = False

    @property
    def main_metric(self) -> str:
        """The metric that tables and gates use: ``acc_norm`` before ``acc`` before the first that there is."""
        return next(
            (name for name in ("acc_norm", "acc", "exact_match") if name in self.figures),
            next(iter(self.figures)),
        )


@dataclass(frozen=True)
class EvalResults:
    """One run: one model on some tasks.

    Attributes:
        model: As the user named it.
        identity: What the results are keyed by: digests of model, settings, delta, template and suite, decoding, dtype,
            engine, harness.
        tasks: By name.
        seconds: Of the run; with many models in one pass, of the pass.
        facts: Of machine and libraries, for the record.
    """

    model: str
    identity: Mapping[str, str]
    tasks: Mapping[str, TaskResult]
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, task: str) -> dict[str, float]:
        """The values of a task by metric, and ``num_examples``."""
        found = self.tasks[task]
        values = {name: figure.value for name, figure in found.figures.items()}
        return {**values, "num_examples": len(found.samples)}

    def save(self, path: str | Path) -> Path:
        """Write the values of every task as JSON."""
        target = Path(path)
        document = {task: self[task] for task in self.tasks}
        write_atomically(target, f"{json.dumps(document, indent=2, sort_keys=True)}\n".encode())
        return target
