"""Untrusted rows and templates: too deep, too long or too large ones are refused, naming the key or file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.suites import row_files, sandbox
from gym_fed.evaluation.suites.own_file import AnswerStep, TaskMetric
from gym_fed.evaluation.suites.rendering import TemplateProblem, parse, render, require_quick, value_of
from gym_fed.evaluation.suites.row_files import read_rows


@pytest.mark.parametrize("text", ["²", "1" * 5000])
def test_digits_that_are_no_number_of_a_choice_are_text(text: str) -> None:
    config = {"doc_to_text": "{{q}}", "doc_to_target": "{{a}}", "doc_to_choice": ["x", "y"]}
    found = render(config, {"q": text, "a": "1"})
    assert (found.prompt, found.gold) == (text, (1,))


@pytest.mark.parametrize("inside", ["-" * 200_000, "1+" * 20_000])
def test_a_target_that_is_too_deep_for_a_list_is_text(inside: str) -> None:
    assert value_of("doc_to_target", "{{a}}", {"a": f"[{inside}1]"}, False) == f"[{inside}1]"


@pytest.mark.parametrize("template", ["{{" + "(" * 100_000, "{{" + "-" * 100_000 + "1}}"])
def test_a_template_that_is_too_deep_is_refused_by_key(template: str) -> None:
    with pytest.raises(TemplateProblem, match="doc_to_text: not a Jinja template: nested too deeply"):
        parse("doc_to_text", template)


def test_a_template_that_calls_itself_is_refused_by_key() -> None:
    with pytest.raises(TemplateProblem, match="doc_to_text: fails: it is nested too deeply, or calls itself"):
        value_of("doc_to_text", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", {}, False)


def test_a_parquet_file_whose_rows_share_a_large_value_is_refused_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(row_files, "MAX_BYTES", 1 << 20)
    file = tmp_path / "rows.parquet"
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 500), pyarrow.array(["x" * 10_000]))
    parquet.write_table(pyarrow.table({"text": column}), file)
    assert file.stat().st_size < 20_000
    with pytest.raises(GymError, match=r"rows\.parquet: more than 1048576 bytes") as caught:
        read_rows(file)
    assert caught.value.code is ErrorCode.TOO_LARGE
    parquet.write_table(pyarrow.table({"text": column[:50]}), file)
    assert read_rows(file) == [{"text": "x" * 10_000}] * 50


def test_a_parquet_file_of_more_rows_than_a_set_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(row_files, "MAX_ROWS", 1000)
    parquet.write_table(
        pyarrow.table({"text": pyarrow.nulls(1001, pyarrow.int8())}), tmp_path / "rows.parquet"
    )
    with pytest.raises(GymError, match="more than 1000 rows") as caught:
        read_rows(tmp_path / "rows.parquet")
    assert caught.value.code is ErrorCode.TOO_LARGE


@pytest.mark.parametrize(
    "template",
    [
        "{{ '%300000000d' % 1 }}",
        "{{ '%*d' % (300000000, 1) }}",
        "{{ '%(a)s%(a)s' % {'a': 'x' * 9000000} }}",
        "{{ 'a'.rjust(300000000) }}",
        "{{ 'a'.zfill(300000000) }}",
        "{{ '{:>300000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=300000000) }}",
        "{{ ('{:9999999}' * 40).format(*range(40)) }}",
        "{{ '{a:>300000000}'.format_map({'a': 1}) }}",
        "{{ 'a' | center(300000000) }}",
        "{{ '%300000000d' | format(1) }}",
        "{{ ('a\n' * 3000) | indent(100000) }}",
        "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ range(100000) | join('x' * 100000) }}",
        "{{ ('x' * 100000).join(['a'] * 100000) }}",
        "{{ ['x' * 100000] * 100000 }}",
        "{% set n = namespace(x='x') %}{% for i in range(30) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x='x') %}{% for i in range(30) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=9) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x > 1 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{{ [1] | batch(300000000, 0) | list }}",
    ],
)
def test_a_template_whose_result_would_fill_the_memory_is_refused_by_key(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 10_000)
    with pytest.raises(TemplateProblem, match=r"doc_to_text: .*not allowed in a template"):
        value_of("doc_to_text", template, {}, False)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '%5.1f%%|%s' % (2.25, q) }}", "  2.2%|why"),
        ("{{ '{:>5}|{q}'.format(1, q=q) }}", "    1|why"),
        ("{{ q ~ 1 ~ none ~ [2] }}", "why1None[2]"),
        (
            "{% for c in cs %}{{ loop.index }}/{{ loop.length }}{{ c }}{% if not loop.last %}, {% endif %}{% endfor %}",
            "1/2a, 2/2b",
        ),
        ("{% for c in cs if c == 'b' %}{{ c }}{% else %}none{% endfor %}", "b"),
        (
            "{{ cs | map('upper') | join('-') }}|{{ '-'.join(cs) }}|{{ q.replace('w', 'W') | center(7) }}",
            "A-B|a-b|  Why  ",
        ),
        ("{{ 'a\nb' | indent(2) }}{{ [1] + [2] }}{{ 7 % 4 }}{{ cs | tojson }}", 'a\n  b[1, 2]3["a", "b"]'),
        ("{{ cs | batch(1) | list | length }}{{ 2.567 | round(1) }}", "22.6"),
    ],
)
def test_what_templates_use_is_as_in_jinja(template: str, text: str) -> None:
    assert value_of("doc_to_text", template, {"q": "why", "cs": ["a", "b"]}, False) == text


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|a)*b", "(a*)*", "(?:a?){40}b", "(?:.*a){20}", "(?=(a|ab)+)c", "(?>(a+)+)c", ".*.*.*.*x"],
)
def test_an_expression_that_may_take_for_ever_is_refused_wherever_it_stands(pattern: str) -> None:
    text = "a" * 200_000 + "!"
    problem = "a repeat within a repeat|too many ways to match"
    with pytest.raises(ValueError, match=problem):
        AnswerStep(function="regex", regex_pattern=pattern)
    with pytest.raises(ValueError, match=problem):
        TaskMetric(metric="exact_match", regexes_to_ignore=[pattern])
    with pytest.raises(TemplateProblem, match=problem):
        value_of("doc_to_text", "{{ q | regex_replace(p, '') }}", {"q": text, "p": pattern}, False)


def test_a_replacement_that_would_fill_the_memory_is_refused() -> None:
    template = "{{ ('a' * 10000) | regex_replace('a', 'b' * 10000) }}"
    with pytest.raises(TemplateProblem, match="regex_replace: 10,000 characters for each match in 10000"):
        value_of("doc_to_text", template, {}, False)
    assert value_of("doc_to_text", "{{ 'a1b22' | regex_replace('[0-9]+', '#') }}", {}, False) == "a#b#"


@pytest.mark.parametrize(
    "pattern",
    [
        r"#### (\-?[0-9\.\,]+)",
        r"(-?[$0-9.,]{2,})|(-?[0-9]+)",
        r"<answer>\s*(.*?)\s*</answer>",
        r"(?i)answer is \(?([A-D])\)?",
        r"(?<=answer is )(.*)(?=\.)",
        r"\\boxed\{([^}]*)\}",
    ],
)
def test_expressions_that_tasks_have_are_taken(pattern: str) -> None:
    require_quick(pattern)


def test_of_a_prompt_of_millions_of_characters_only_the_end_is_encoded_to_the_same_tokens() -> None:
    pytest.importorskip("lm_eval")
    from gym_fed.base.models import load_tokenizer
    from gym_fed.evaluation.harness.preparation import encoder_of

    tokenizer, lengths = load_tokenizer("gym-nano"), []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def encode(self, text: str, **options: Any) -> Any:
            lengths.append(len(text))
            return tokenizer.encode(text, **options)

    encoder, context = encoder_of(Counted(), 16), "the cat sat. " * 1000
    whole = tokenizer.encode(context)
    assert encoder.tok_encode_prompt(context)[-16:] == whole[-16:]
    head, tail = encoder._encode_pair(context, " yes")
    assert ([*head, *tail])[-16:] == tokenizer.encode(context + " yes")[-16:]
    assert tail == encoder._encode_pair("the cat sat. ", " yes")[1]
    assert max(lengths) <= 16 * 64 + len(" yes")
    assert encoder.tok_encode_prompt("the cat") == tokenizer.encode("the cat")


def test_a_long_prompt_of_few_tokens_is_encoded_whole() -> None:
    pytest.importorskip("lm_eval")
    from types import SimpleNamespace

    from gym_fed.evaluation.harness.preparation import encoder_of

    lines = SimpleNamespace(encode=lambda text: [len(one) for one in text.split("|")], bos_token=None)
    assert encoder_of(lines, 16).tok_encode_prompt("x" * 5000 + "|" + "y" * 5000) == [5000, 5000]
