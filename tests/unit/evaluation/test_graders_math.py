"""The grader math_verify: equal mathematics is right in any form, and no answer can stop a run."""

from __future__ import annotations

import time

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.base import Sample, build_graders
from gym_fed.evaluation.graders.math_verify import MathVerify, MathVerifyConfig

pytest.importorskip("math_verify")


def grader(**settings: object) -> MathVerify:
    built = MathVerify(MathVerifyConfig.model_validate({"grader": "math_verify", **settings}))
    built.setup()
    return built


def test_equal_mathematics_is_right_in_any_form_and_other_is_wrong() -> None:
    pairs = [
        ("0.5", r"The answer is $\frac{1}{2}$.", 1.0),
        (r"\frac{\sqrt{3}}{3}", r"\boxed{\frac{1}{\sqrt{3}}}", 1.0),
        (r"$x^2+2x+1$", r"So it is $(x+1)^2$", 1.0),
        ("12", "I count 10, no: 12", 1.0),
        ("12", "13", 0.0),
        (r"\{1,2\}", r"$\{2,1\}$", 1.0),
        ("7", "no number at all", 0.0),
        ("7", "", 0.0),
        ("B", "B", 1.0),
        ("(B)", "The answer is (B).", 1.0),
        ("B", "The answer is C", 0.0),
        ("B", "nothing to choose", 0.0),
        ("x+y", "$y+x$", 1.0),
        ("$ab$", "$ba$", 1.0),
    ]
    samples = [Sample("q", answer, {"answer": reference}) for reference, answer, _ in pairs]
    assert grader().grade(samples) == [right for *_, right in pairs]


def test_an_answer_that_takes_too_long_is_wrong_and_counted() -> None:
    built = grader(timeout_seconds=1)
    warm = Sample("q", "1", {"answer": "1"})
    assert built.grade([warm]) == [1.0]
    tower = Sample("q", r"$10^{10^{10^{10}}} - 3^{3^{3^{3^{3}}}}$", {"answer": r"$7^{7^{7^{7}}}$"})
    began = time.monotonic()
    assert built.grade([tower, warm]) == [0.0, 1.0]
    assert built.num_exceeded == 1
    with pytest.warns(UserWarning, match="1 answer exceeded"):
        built.teardown()
    assert time.monotonic() - began < 90


@pytest.mark.parametrize("reference", ["???", "", "Paris", "yes it is"])
def test_a_reference_without_mathematics_is_refused_by_name(reference: str) -> None:
    with pytest.raises(GymError, match="math_verify: 'answer' contains no mathematics") as caught:
        grader().grade([Sample("q", "1", {"answer": reference})])
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_the_grader_is_built_by_its_name() -> None:
    (built,) = build_graders(
        [MathVerifyConfig.model_validate({"grader": "math_verify", "column": "solution"})]
    )
    assert isinstance(built, MathVerify)
    assert built.grade([Sample("q", "2", {"solution": "2.0"})]) == [1.0]
