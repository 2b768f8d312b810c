"""Graders that are rules: what counts as right, what does not, and which configs are refused with line and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from gym_fed.config.train.graders import GraderSections
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.base import CombinedGrader, Grader, Sample, build_graders
from gym_fed.evaluation.graders.numeric import number_in


def built(**keys: Any) -> Grader:
    (grader,) = build_graders(GraderSections.model_validate({"graders": [keys]}).graders)
    return grader


def reward(completion: str, row: dict[str, Any] | None = None, **keys: Any) -> float:
    grader = built(**keys)
    grader.setup()
    try:
        (value,) = grader.grade([Sample("a question", completion, row or {})])
    finally:
        grader.teardown()
    return value


@pytest.mark.parametrize(
    ("said", "keys", "value"),
    [
        (" Paris\n", {}, 1.0),
        ("paris", {}, 0.0),
        ("paris", {"ignore_case": True}, 1.0),
        (" Paris", {"whitespace": "exact"}, 0.0),
        ("Paris is it", {}, 0.0),
    ],
)
def test_exact_compares_with_the_answer(said: str, keys: dict[str, Any], value: float) -> None:
    assert reward(said, {"answer": "Paris"}, grader="exact", **keys) == value


def test_exact_takes_any_of_several_references_and_collapses_white_space() -> None:
    row = {"golds": ["New York", "NYC"]}
    assert reward("New \n York", row, grader="exact", column="golds", whitespace="collapse") == 1.0
    assert reward("New \n York", row, grader="exact", column="golds") == 0.0


def test_a_row_without_the_column_is_named_and_not_graded_as_wrong() -> None:
    with pytest.raises(
        GymError, match=r"grader exact: a row has no column 'answer' \(columns: id\).*a question"
    ) as info:
        reward("x", {"id": 3}, grader="exact")
    assert info.value.code is ErrorCode.DATA_INVALID


@pytest.mark.parametrize(
    ("said", "keys", "value"),
    [
        ("<think>hm</think> 4", {"pattern": r"^<think>.*</think>"}, 1.0),
        ("4", {"pattern": r"^<think>.*</think>"}, 0.0),
        ("so Answer: 4.", {"pattern": r"Answer: (\d+)", "column": "answer"}, 1.0),
        ("Answer: 5, no, Answer: 4", {"pattern": r"Answer: (\d+)", "column": "answer"}, 0.0),
        (
            "Answer: 5, no, Answer: 4",
            {"pattern": r"Answer: (\d+)", "column": "answer", "occurrence": "last"},
            1.0,
        ),
        ("5 is 4", {"pattern": r"(\d) is (?P<answer>\d)", "column": "answer"}, 1.0),
        ("ANSWER", {"pattern": "answer"}, 0.0),
        ("ANSWER", {"pattern": "answer", "ignore_case": True}, 1.0),
    ],
)
def test_regex_searches_and_compares(said: str, keys: dict[str, Any], value: float) -> None:
    assert reward(said, {"answer": "4"}, grader="regex", **keys) == value


def test_a_pattern_of_exponential_time_is_given_up() -> None:
    assert (
        reward("a" * 60, grader="regex", pattern=r"^(a|aa)+(a|aa)+(a|aa)+b$|x\b(a*)*y", timeout_seconds=0.05)
        == 0
    )


def test_bad_patterns_are_refused_when_the_config_is_built() -> None:
    with pytest.raises(GymError, match=r"graders: regex: pattern '\(' is not a regular expression"):
        built(grader="regex", pattern="(")
    with pytest.raises(GymError, match="has no group to compare with 'answer'"):
        built(grader="regex", pattern="x", column="answer")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", 7),
        ("it costs $1,234.50", 1234.5),
        ("#### 42\n", 42),
        ("12 #### 1,000 in 3 days", 1000),
        (r"\boxed{\frac{3}{4}} and 9", 0.75),
        (r"\boxed{\frac12}", 0.5),
        (r"\boxed{-1\frac{1}2}", -1.5),
        ("-1 1/2", -1.5),
        ("of 10 20/4", 5.0),
        ("1.234.567", None),
        ("9 or 1,2", None),
        ("0.5.", 0.5),
        (r"\boxed{x = {12}}", 12),
        ("-5", -5),
        ("3-5", 5),
        ("a is 1/8", 0.125),
        ("2.5e3", 2500),
        ("minus −7", -7),
        (".5", 0.5),
        ("1/0", None),
        ("none at all", None),
    ],
)
def test_numbers_are_found_as_people_write_them(text: str, number: float | None) -> None:
    assert number_in(text) == number


@pytest.mark.parametrize(
    ("said", "keys", "value"),
    [
        ("I get 72", {}, 1.0),
        ("72 apples and 3 pears", {}, 0.0),
        ("#### 72 and 3", {}, 1.0),
        ("the answer is 72", {"where": "hashes"}, 0.0),
        (r"\boxed{72} of 3", {"where": "last"}, 0.0),
        ("72.4", {"absolute_tolerance": 0.5}, 1.0),
        ("72.6", {"absolute_tolerance": 0.5}, 0.0),
        ("72.7", {"relative_tolerance": 0.01}, 1.0),
        ("no number", {}, 0.0),
    ],
)
def test_numeric_compares_the_number_that_counts(said: str, keys: dict[str, Any], value: float) -> None:
    assert reward(said, {"answer": "48 / 2 = 24, 48 + 24 = 72 #### 72"}, grader="numeric", **keys) == value


def test_a_reference_without_a_number_is_an_error_of_the_data() -> None:
    with pytest.raises(GymError, match="'answer' contains no number: 'blue'"):
        reward("3", {"answer": "blue"}, grader="numeric")


def test_a_long_answer_of_digits_takes_no_time_to_speak_of() -> None:
    assert reward("1" * 200_000 + " so 5", {"answer": "5"}, grader="numeric") == 1.0


SCHEMA = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ('{"name": "Ada"}', 1.0),
        ('Here you are:\n```json\n{"name": "Ada"}\n```\n', 1.0),
        ('{"name": 3}', 0.25),
        ('{"name": NaN}', 0.0),
        ('{"name": "Ada"', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_must_parse_and_fit_the_schema(said: str, value: float) -> None:
    assert reward(said, grader="json_schema", json_schema=SCHEMA, parsed_reward=0.25) == value


def test_the_schema_may_come_with_the_row_as_mapping_or_text() -> None:
    keys = {"grader": "json_schema", "column": "schema"}
    assert reward("3", {"schema": {"type": "integer"}}, **keys) == 1.0
    assert reward("3", {"schema": '{"type": "string"}'}, **keys) == 0.0
    with pytest.raises(GymError, match="'schema' is not JSON"):
        reward("3", {"schema": "{"}, **keys)


def test_bad_schemas_and_references_to_elsewhere_are_refused() -> None:
    with pytest.raises(GymError, match=r"invalid JSON schema at \$\.type") as info:
        reward("{}", grader="json_schema", json_schema={"type": "wrong"})
    assert info.value.code is ErrorCode.CONFIG_INVALID
    with pytest.raises(GymError, match=r"refers to 'http://127.0.0.1:9/x.json', which is outside it"):
        reward("{}", grader="json_schema", json_schema={"$ref": "http://127.0.0.1:9/x.json"})


@pytest.mark.parametrize(
    ("said", "keys", "value"),
    [
        ("one two three", {"min": 2, "max": 4}, 1.0),
        ("one", {"min": 2, "max": 4}, 0.0),
        ("one", {"min": 2, "soft": 2}, 0.5),
        ("a b c d e f g", {"max": 4, "soft": 4}, 0.25),
        ("a b c d e f g h", {"max": 4, "soft": 4}, 0.0),
        ("12345", {"unit": "characters", "max": 4}, 0.0),
        ("123", {"unit": "tokens", "tokenizer": "gym-nano", "min": 3, "max": 3}, 1.0),
    ],
)
def test_length_is_rewarded_in_a_range_with_soft_edges(said: str, keys: dict[str, Any], value: float) -> None:
    assert reward(said, grader="length", **keys) == pytest.approx(value)


def test_weight_clip_and_name_of_an_entry_are_honoured() -> None:
    grader = built(grader="length", max=0, soft=10, weight=-2.0, clip=[0.0, 0.5], name="terse")
    assert grader.name == "terse"
    assert grader.grade([Sample("", "a"), Sample("", "a b c d e f g h")]) == pytest.approx([-1.0, -0.4])


def test_yaml_errors_name_line_and_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("algorithm: grpo\ngraders:\n  - grader: exact\n    ignore_cas: true\n  - grader: exakt\n")
    with pytest.raises(GymError) as info:
        load_config(file, TrainingConfig)
    assert (
        f"{file}:4:5: graders.0.ignore_cas: unknown key (did you mean 'ignore_case'?)" in info.value.message
    )
    assert f"{file}:5:5: graders.1" in info.value.message
    assert "'exakt'" in info.value.message


@pytest.mark.parametrize(
    ("graders", "problem"),
    [
        ([{"grader": "exact"}, {"grader": "exact", "ignore_case": True}], "two graders are called 'exact'"),
        ([{"grader": "exact", "weight": 0}], "every weight is 0"),
        ([{"grader": "exact", "clip": [1, 0]}], "clip: the first number must be below"),
        ([{"grader": "json_schema"}], "set either json_schema or column"),
        ([{"grader": "length", "unit": "tokens", "max": 3}], "tokenizer is required for unit tokens"),
        ([{"grader": "length", "min": 3, "max": 2}], "max is below min"),
        (
            [{"grader": "judge", "model": "m", "base_url": "http://x", "prompt": "hi"}],
            "would not see the answer",
        ),
    ],
)
def test_configs_that_contradict_themselves_are_refused(graders: list[Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GraderSections.model_validate({"graders": graders})


class Fixed(Grader):
    """Returns the values it is given, and records whether it was set up and torn down."""

    def __init__(self, name: str, values: list[float], fails: str = "") -> None:
        self.name, self.values, self.fails, self.calls = name, values, fails, ""

    def setup(self) -> None:
        self._record("setup")

    def grade(self, samples: Any) -> list[float]:
        return self.values

    def teardown(self) -> None:
        self._record("teardown")

    def _record(self, what: str) -> None:
        self.calls += f"{what} "
        if self.fails == what:
            raise RuntimeError(f"{self.name} fails")


def test_combined_adds_by_weight_clips_and_keeps_what_each_said() -> None:
    parts = [(Fixed("a", [1.0, 9.0]), 1.0), (Fixed("b", [0.5, -1.0]), 2.0)]
    combined = CombinedGrader(parts, name="both", clips=[(0.0, 5.0), None], clip=(0.0, 2.5))
    assert combined.grade([Sample("", ""), Sample("", "")]) == [2.0, 2.5]
    assert combined.values == {"a": [1.0, 9.0], "b": [0.5, -1.0]}


def test_combined_tears_every_grader_down_even_if_one_fails() -> None:
    graders = [Fixed("a", []), Fixed("b", [], fails="teardown"), Fixed("c", [])]
    combined = CombinedGrader([(grader, 1.0) for grader in graders])
    combined.setup()
    with pytest.raises(RuntimeError, match="b fails"):
        combined.teardown()
    assert [grader.calls for grader in graders] == ["setup teardown "] * 3


def test_combined_gives_back_what_was_set_up_when_a_later_grader_cannot_be() -> None:
    graders = [Fixed("a", []), Fixed("b", [], fails="setup"), Fixed("c", [])]
    with pytest.raises(RuntimeError, match="b fails"):
        CombinedGrader([(grader, 1.0) for grader in graders]).setup()
    assert [grader.calls for grader in graders] == ["setup teardown ", "setup teardown ", ""]


@pytest.mark.parametrize("values", [[1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_combined_refuses_a_wrong_number_of_values_and_those_not_finite(values: list[float]) -> None:
    with pytest.raises(GymError, match="grader a returned"):
        CombinedGrader([(Fixed("a", values), 1.0)]).grade([Sample("", ""), Sample("", "")])


def test_the_schema_of_graders_as_json_schema_names_the_discriminator() -> None:
    assert "discriminator" in str(TypeAdapter(GraderSections).json_schema())
