"""Spans of rounds: one trace a round, joined without trust, and nothing at all without an endpoint."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gym_fed.core import tracing
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.logs import MAX_LOG_LINE, JsonLogLine
from tests.support.otlp import OtlpReceiver, attributes_of, needs_otlp

TRACE = tracing.RoundTrace.of("s1", 3)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    tracing.start_tracing("tests", receiver.url, "observe.otlp_endpoint")
    yield receiver
    tracing.stop_tracing()
    receiver.close()


def header(trace: int = TRACE.trace_id, span: int = 0xAB) -> str:
    return f"00-{trace:032x}-{span:016x}-01"


def test_hub_and_contributor_agree_on_a_rounds_trace_without_asking_each_other() -> None:
    assert tracing.RoundTrace.of("s1", "3") == TRACE
    others = {tracing.RoundTrace.of("s1", 4), tracing.RoundTrace.of("s2", 3)}
    assert len({TRACE, *others}) == 3


@pytest.mark.parametrize(
    "text",
    [
        *("", "00", "x" * 10_000, header() + "0", header().replace("-01", "-00"), header()[:-1]),
        *(header(trace=TRACE.trace_id ^ 1), header(span=0), "00-" + "g" * 32 + "-" + "1" * 16 + "-01"),
        header().upper(),
        "\u0664" + header()[1:],
    ],
)
def test_a_callers_header_that_is_not_of_this_round_chooses_nothing(text: str) -> None:
    assert TRACE.parent(text) == TRACE.root_id


def test_a_callers_header_of_this_round_is_the_parent() -> None:
    assert TRACE.parent(header()) == 0xAB


def test_nothing_is_recorded_or_imported_without_an_endpoint() -> None:
    with tracing.round_span("admit", "s1", 3) as span:
        assert span is None
        assert tracing.begin_child("phase") is None
    tracing.record_root("s1", 3, 0.0, 1.0)
    assert (tracing.traceparent_of(None), tracing.current_trace_id(), tracing.outgoing_metadata()) == (
        "",
        "",
        (),
    )
    code = "import sys, gym_fed.core.tracing, gym_server.cli.run; print([m for m in sys.modules if 'opentel' in m])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_an_endpoint_without_the_extra_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GymError, match=r"observe\.otlp_endpoint needs the package opentelemetry") as refused:
        tracing.start_tracing("tests", "http://127.0.0.1:4317", "observe.otlp_endpoint")
    assert refused.value.code is ErrorCode.MISSING_DEPENDENCY
    assert "gym-fed[observe]" in refused.value.hint


@needs_otlp
def test_spans_of_a_round_are_one_tree_below_its_root(receiver: OtlpReceiver) -> None:
    with tracing.round_span("merge", "s1", 3):
        child = tracing.begin_child("evaluate", phase="evaluating")
        assert child is not None
        child.end()
    with tracing.round_span("admit", "s1", 3, header(), verdict="admitted"):
        pass
    tracing.record_root("s1", 3, 100.0, 160.5, outcome="committed")
    tracing.stop_tracing()
    spans = {span.name: span for _, span in receiver.spans}
    assert {span.trace_id.hex() for span in spans.values()} == {f"{TRACE.trace_id:032x}"}
    root = spans["round"]
    assert (root.parent_span_id, root.span_id) == (b"", TRACE.root_id.to_bytes(8))
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (100 * 10**9, 160_500_000_000)
    assert attributes_of(root) == {"gym.round": 3, "gym.outcome": "committed"}
    assert spans["merge"].parent_span_id == root.span_id
    assert spans["evaluate"].parent_span_id == spans["merge"].span_id
    assert spans["admit"].parent_span_id == (0xAB).to_bytes(8)
    assert attributes_of(spans["admit"]) == {"gym.verdict": "admitted"}


@needs_otlp
def test_an_exception_is_told_by_its_type_alone(receiver: OtlpReceiver) -> None:
    with pytest.raises(ValueError, match="secret"), tracing.round_span("admit", "s1", 3):
        raise ValueError("secret words of a contributor")
    tracing.stop_tracing()
    ((_, span),) = receiver.spans
    assert (span.status.code, span.status.message, list(span.events)) == (2, "ValueError", [])


@needs_otlp
def test_a_log_line_inside_a_span_names_its_trace(receiver: OtlpReceiver) -> None:
    with tracing.round_span("merge", "s1", 3):
        assert json.loads(formatted("x"))["trace_id"] == f"{TRACE.trace_id:032x}"
    assert "trace_id" not in json.loads(formatted("x"))


def formatted(message: str, *arguments: object) -> str:
    record = logging.LogRecord("gym_server", logging.WARNING, "f.py", 1, message, arguments, None)
    return JsonLogLine().format(record)


def test_a_record_as_json_is_one_bounded_line_whatever_it_says() -> None:
    line = formatted("%s", "\x1b[2J\n\u202e{" + "y" * 10_000)
    assert line.isascii()
    assert line.isprintable()
    values = json.loads(line)
    assert (values["level"], values["logger"]) == ("warning", "gym_server")
    assert len(values["message"]) == MAX_LOG_LINE
    assert values["at"].endswith("+00:00")


def test_a_traceback_is_a_field_of_its_records_line() -> None:
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        record = logging.LogRecord("gym_fed", logging.ERROR, "f.py", 1, "failed", (), sys.exc_info())
    line = JsonLogLine().format(record)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("RuntimeError: boom")
