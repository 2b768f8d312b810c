"""Evaluation of models and deltas: benchmark tasks, held-out loss, exact match, graders, and encoding error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.evaluation.evaluator import Evaluator as Evaluator
    from gym_fed.evaluation.generation import answer as answer
    from gym_fed.evaluation.generation import exact_match as exact_match
    from gym_fed.evaluation.generation import generate_batch as generate_batch
    from gym_fed.evaluation.graders.base import CombinedGrader as CombinedGrader
    from gym_fed.evaluation.graders.base import Grader as Grader
    from gym_fed.evaluation.graders.base import Sample as Sample
    from gym_fed.evaluation.graders.remote import reward_server as reward_server
    from gym_fed.evaluation.grading import Grades as Grades
    from gym_fed.evaluation.grading import grade as grade
    from gym_fed.evaluation.grading import grade_answers as grade_answers
    from gym_fed.evaluation.loss import heldout_loss as heldout_loss
    from gym_fed.evaluation.merge_statistics import LayerError as LayerError
    from gym_fed.evaluation.merge_statistics import layer_errors as layer_errors
    from gym_fed.evaluation.results import EvalResults as EvalResults

__all__, __getattr__ = lazy(__name__)
