"""How good a model is: held-out loss, exact match, single answers; how exact a delta is. Names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.evaluation.delta_error import LayerError, layer_errors
    from gym_fed.evaluation.generation import answer, exact_match, generate_batch
    from gym_fed.evaluation.grading import Grades, grade, grade_answers
    from gym_fed.evaluation.loss import heldout_loss

__all__ = [
    "Grades",
    "LayerError",
    "answer",
    "exact_match",
    "generate_batch",
    "grade",
    "grade_answers",
    "heldout_loss",
    "layer_errors",
]

__getattr__ = lazy(
    __name__,
    LayerError="gym_fed.evaluation.delta_error",
    Grades="gym_fed.evaluation.grading",
    answer="gym_fed.evaluation.generation",
    exact_match="gym_fed.evaluation.generation",
    generate_batch="gym_fed.evaluation.generation",
    grade="gym_fed.evaluation.grading",
    grade_answers="gym_fed.evaluation.grading",
    heldout_loss="gym_fed.evaluation.loss",
    layer_errors="gym_fed.evaluation.delta_error",
)
