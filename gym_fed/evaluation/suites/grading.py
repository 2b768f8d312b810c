"""Metrics of ours where the harness's would reach for a network: code in our sandbox, calls by JSON Schema, chrF.

Each is a function of a row and the model's answers, as the harness calls ``process_results``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError

Process = Callable[[Mapping[str, Any], Sequence[Any]], dict[str, float]]

GRADES = {"humaneval": "pass@1", "mbpp": "pass@1", "json_schema": "valid", "chrf": "chrf"}
"""The metric of each, which is a mean over the rows and higher for the better model."""
COLUMNS = {
    "humaneval": ("prompt", "test", "entry_point"),
    "mbpp": ("test_list",),
    "json_schema": ("json_schema",),
    "chrf": (),
}
"""What a row needs for each."""
_FIRST_OBJECT = re.compile(r"\{.*\}", re.DOTALL)


def process_results(grade: str, target: Callable[[Mapping[str, Any]], Any]) -> Process:
    """The harness's ``process_results`` for one of ``GRADES``; ``target`` gives a row's right answer."""
    metric = GRADES[grade]
    value: Callable[[Mapping[str, Any], str], float] = {
        "humaneval": _continues,
        "mbpp": _stands_alone,
        "json_schema": _is_valid,
        "chrf": lambda row, answer: _chrf(str(target(row)), answer),
    }[grade]

    def process(row: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
        answer = results[0]
        return {metric: value(row, str(answer[0] if isinstance(answer, list) else answer))}

    return process


def check(grade: str) -> None:
    """Refuse a grade that this machine cannot give, before a model is loaded.

    Raises:
        GymError: ``CONFIG_INVALID`` without a sandbox, ``MISSING_DEPENDENCY`` without sacrebleu.
    """
    if grade in ("humaneval", "mbpp"):
        _sandbox().check()
    if grade == "chrf":
        _chrf("", "")


def _continues(row: Mapping[str, Any], answer: str) -> float:
    """HumanEval (Chen et al. 2021): the answer goes on where the prompt ends."""
    tests = f"{row['test']}\ncheck({row['entry_point']})\n"
    return float(_sandbox().passes(f"{row['prompt']}{answer}", tests))


def _stands_alone(row: Mapping[str, Any], answer: str) -> float:
    """MBPP (Austin et al. 2021): the answer stands alone; the first three tests are run, as the prompt names them."""
    tests = [str(row.get("test_setup_code") or ""), *map(str, row["test_list"][:3])]
    return float(_sandbox().passes(answer, "\n".join(tests)))


def _is_valid(row: Mapping[str, Any], answer: str) -> float:
    from gym_fed.evaluation.graders.base import Sample

    found = _FIRST_OBJECT.search(answer)
    sample = Sample("", found[0] if found else answer, {"json_schema": row["json_schema"]})
    return float(_schemas().grade([sample])[0])


def _chrf(reference: str, answer: str) -> float:
    """chrF2 of a sentence, 0 to 100 (Popović 2015); the task's figure is the mean of these."""
    try:
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY, "chrF needs sacrebleu", "pip install 'gym-fed[eval]'"
        ) from error
    return float(CHRF().sentence_score(answer, [reference]).score)


@cache
def _sandbox() -> Any:
    from gym_fed.evaluation.graders._sandbox import Sandbox

    return Sandbox()


@cache
def _schemas() -> Any:
    from gym_fed.evaluation.graders.json_schema import JsonSchemaConfig, JsonSchemaGrader

    return JsonSchemaGrader(JsonSchemaConfig(grader="json_schema", column="json_schema"))
