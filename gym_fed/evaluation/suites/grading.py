"""Built-in metrics instead of those of the harness that use a network: code in a sandbox, JSON Schema, chrF.

Each metric is a function of a row and the model's answers, with the interface of the harness's ``process_results``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError

Process = Callable[[Mapping[str, Any], Sequence[Any]], dict[str, float]]

GRADES = {"humaneval": "pass@1", "mbpp": "pass@1", "json_schema": "valid", "chrf": "chrf"}
"""The metric of each grade, a mean over the rows where higher is better."""
COLUMNS = {
    "humaneval": ("prompt", "test", "entry_point"),
    "mbpp": ("test_list",),
    "json_schema": ("json_schema",),
    "chrf": (),
}
"""The columns that each grade needs."""
_FIRST_OBJECT = re.compile(r"\{.*\}", re.DOTALL)


def process_results(grade: str, target: Callable[[Mapping[str, Any]], Any]) -> Process:
    """Implement the harness's ``process_results`` for one of ``GRADES``; ``target`` returns a row's correct answer."""
    metric = GRADES[grade]
    value: Callable[[Mapping[str, Any], str], float] = {
        "humaneval": _passes_humaneval,
        "mbpp": _passes_mbpp,
        "json_schema": _is_valid,
        "chrf": lambda row, answer: _chrf(str(target(row)), answer),
    }[grade]

    def process(row: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
        answer = results[0]
        return {metric: value(row, str(answer[0] if isinstance(answer, list) else answer))}

    return process


def check(grade: str) -> None:
    """Refuse a grade that this machine cannot compute, before a model is loaded.

    Raises:
        GymError: ``CONFIG_INVALID`` without a sandbox, ``MISSING_DEPENDENCY`` without sacrebleu.
    """
    if grade in ("humaneval", "mbpp"):
        _sandbox().check()
    if grade == "chrf":
        _chrf("", "")


def _passes_humaneval(row: Mapping[str, Any], answer: str) -> float:
    """Run the tests of HumanEval (Chen et al. 2021), where the answer continues the prompt."""
    tests = f"{row['test']}\ncheck({row['entry_point']})\n"
    return float(_sandbox().passes(f"{row['prompt']}{answer}", tests))


def _passes_mbpp(row: Mapping[str, Any], answer: str) -> float:
    """Run the first three tests of MBPP (Austin et al. 2021), where the answer is a complete program."""
    tests = [str(row.get("test_setup_code") or ""), *map(str, row["test_list"][:3])]
    return float(_sandbox().passes(answer, "\n".join(tests)))


def _is_valid(row: Mapping[str, Any], answer: str) -> float:
    from gym_fed.evaluation.graders.base import Sample

    match = _FIRST_OBJECT.search(answer)
    sample = Sample("", match[0] if match else answer, {"json_schema": row["json_schema"]})
    return float(_schemas().grade([sample])[0])


def _chrf(reference: str, answer: str) -> float:
    """Return the chrF2 of a sentence, 0 to 100 (Popović 2015), averaged over the task."""
    try:
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY, "chrF needs sacrebleu", "pip install 'gym-fed[eval]'"
        ) from error
    return float(CHRF().sentence_score(answer, [reference]).score)


@cache
def _sandbox() -> Any:
    from gym_fed.evaluation.graders.code_tests import Sandbox

    return Sandbox()


@cache
def _schemas() -> Any:
    from gym_fed.evaluation.graders.json_schema import JsonSchemaConfig, JsonSchemaGrader

    return JsonSchemaGrader(JsonSchemaConfig(grader="json_schema", column="json_schema"))
