"""Results of evaluations that were never run, for tests of what is done with results."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from gym_fed.evaluation.results import EvalResults, Figure, SampleResult, TaskResult


def choice_task(name: str, right: Sequence[bool], first_row: int = 0) -> TaskResult:
    """A task of two choices, of which the first is right; ``right`` says which rows the model got."""
    samples = tuple(
        SampleResult(
            number=number,
            row_sha256=hashlib.sha256(f"{name} {first_row + number}".encode()).hexdigest(),
            prompt=f"Question {first_row + number}: is water wet?\nAnswer:",
            choices=(" yes", " no"),
            logprobs=(-0.5, -1.25) if got else (-1.25, -0.5),
            answer=None,
            token_ids=(),
            target=" yes",
            metrics={"acc": float(got)},
        )
        for number, got in enumerate(right)
    )
    mean = sum(right) / len(right)
    return TaskResult(name, "1.0", 0, {"acc": Figure(mean, 0.05, len(right))}, samples, f"{name}-lock")


def answer_task(name: str, answers: Sequence[str], margin: float = 3.0) -> TaskResult:
    """A task of generated answers; the right one is ``4``."""
    samples = tuple(
        SampleResult(
            number=number,
            row_sha256=hashlib.sha256(f"{name} {number}".encode()).hexdigest(),
            prompt=f"{number}: 2 + 2 =",
            choices=(),
            logprobs=(),
            answer=answer,
            token_ids=tuple(answer.encode()),
            target="4",
            metrics={"exact_match": float(answer == "4")},
            margins=(margin,) * len(answer),
        )
        for number, answer in enumerate(answers)
    )
    mean = sum(answer == "4" for answer in answers) / len(answers)
    return TaskResult(
        name, "2", 3, {"exact_match": Figure(mean, None, len(answers))}, samples, f"{name}-lock"
    )


def results_of(*tasks: TaskResult, model: str = "gym-nano", digest: str = "a" * 64) -> EvalResults:
    """A run of these tasks."""
    return EvalResults(
        model=model,
        identity={"model": digest, "delta": "", "suite": "b" * 64, "engine": "test"},
        tasks={task.task: task for task in tasks},
        seconds=1.5,
        facts={"suite": "tiny", "python": "3.11"},
    )
