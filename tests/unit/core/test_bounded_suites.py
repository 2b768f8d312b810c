"""Templates, patterns and schemas that come with an evaluation suite are stopped and named."""

from __future__ import annotations

import pytest

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.bounded import pool
from gym_fed.core.bounded.patterns import BOUNDED_REGEX, BoundedPattern
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.base import Sample
from gym_fed.evaluation.graders.json_schema import JsonSchemaConfig, JsonSchemaGrader
from gym_fed.evaluation.suites.rendering import (
    TemplateProblem,
    first_bounded_problem,
    require_quick,
    sandboxed,
)

SLOW = ".*.*.*x"
"""Within what a suite's file may have, and n to the fourth power on a text without an x."""
CAPTURES = "{% set a %}{{ 'x' * 9000000 }}{% endset %}" + "{% set a %}{{ a }}{{ a }}{{ a }}{% endset %}" * 4
"""No single operation of it makes a large text."""


def test_captures_of_a_suites_template_that_fill_the_memory_are_refused_by_key() -> None:
    render = sandboxed("doc_to_text", CAPTURES + "{{ q }}", False)
    with pytest.raises(TemplateProblem, match="doc_to_text: needs more than 768 MiB of memory"):
        render({"q": "why"})
    found = first_bounded_problem({"doc_to_text": CAPTURES, "doc_to_target": "{{ q }}"}, [{"q": "why"}], 1)
    assert found is not None
    assert (found[0], found[1].problem) == (0, "needs more than 768 MiB of memory")


def test_a_suites_templates_render_alike_in_the_bounded_process() -> None:
    assert sandboxed("doc_to_text", "{{ q }}?", False)({"q": "why"}) == "why?"
    assert sandboxed("doc_to_target", "{{ n }}", True)({"n": 2}) == 2
    assert sandboxed("doc_to_choice", "{{ c }}", True)({"c": ["a", "b"]}) == ["a", "b"]
    with pytest.raises(TemplateProblem, match="doc_to_text: 'p' is undefined") as caught:
        sandboxed("doc_to_text", "{{ p }}", False)({"q": "why"})
    assert caught.value.key == "doc_to_text"


def test_a_pattern_that_takes_for_ever_is_refused_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    require_quick(SLOW)
    pattern = BoundedPattern(SLOW, "filter_list.regex_pattern")
    assert pattern.findall("aax") == ["aax"]
    assert BoundedPattern(r"(\d)(\w)", "here").findall("1a2b") == [("1", "a"), ("2", "b")]
    assert BoundedPattern(r"\d", "here").remove("a1b2") == "ab"
    monkeypatch.setattr(pool, "SECONDS", 0.5)
    for call in (pattern.findall, pattern.remove):
        with pytest.raises(
            GymError, match=r"filter_list\.regex_pattern: the pattern .* longer than 0\.5 s"
        ) as caught:
            call("a" * 20_000)
        assert caught.value.code is ErrorCode.DATA_INVALID


def test_the_harness_searches_a_suites_patterns_in_the_bounded_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.api.registry import get_filter

    from gym_fed.evaluation.harness.isolation import patterns_bounded, register_bounded_filter

    register_bounded_filter()
    made = get_filter(BOUNDED_REGEX)(regex_pattern=SLOW)
    assert made.apply([["aax"], ["b"]], [{}, {}]) == [["aax"], ["[invalid]"]]
    with patterns_bounded():
        found = exact_match_hf_evaluate(["1,000"], ["1000"], regexes_to_ignore=[","])
    assert found["exact_match"] == 1.0
    monkeypatch.setattr(pool, "SECONDS", 0.5)
    with pytest.raises(GymError, match=r"longer than 0\.5 s"):
        made.apply([["a" * 20_000]], [{}])
    with patterns_bounded(), pytest.raises(GymError, match="regexes_to_ignore: the pattern"):
        exact_match_hf_evaluate(["a" * 20_000], ["b"], regexes_to_ignore=[SLOW])


def test_a_schema_whose_pattern_takes_for_ever_allows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonschema")
    schema = {"type": "string", "pattern": "^(a+)+$"}
    config: GraderConfig = JsonSchemaConfig(grader="json_schema", json_schema=schema, parsed_reward=0.5)
    grader = JsonSchemaGrader(config)
    grader.setup()
    assert grader.grade([Sample("", '"aaa"', {})]) == [1.0]
    monkeypatch.setattr(pool, "SECONDS", 0.5)  # only now: on a busy machine a good pattern takes longer, too
    assert grader.grade([Sample("", '"' + "a" * 60 + '!"', {})]) == [0.5]
