"""What an agent shows its owner: figures of its events, in a file or on loopback; none by default."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from gym_client.agent.policy import Policy
from gym_client.display import Display
from gym_client.observe.metrics import PHASES, ROWS, VERDICTS, MeteredDisplay, served
from gym_client.observe.observed import observed
from gym_client.observe.policy import ObservePolicy
from gym_client.observe.spans import TracedDisplay
from prometheus_client.parser import text_string_to_metric_families

from gym_fed.core import tracing
from gym_fed.core.errors import ErrorCode, GymError
from tests.support.otlp import OtlpReceiver, attributes_of, needs_otlp


class Clock:
    """Unix seconds that a test sets."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class Heard(Display):
    """Keeps the events that it is sent."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.closed = False

    def report(self, event: str, text: str, **fields: Any) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


def values(text: bytes) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def task(display: Display, verdict: str = "admitted", clock: Clock | None = None) -> None:
    display.report("task", "round 4: task", task="ab", group="4", server="s1")
    for phase, seconds in (("fetch", 2.0), ("train", 30.0), ("encode", 1.0), ("upload", 5.0)):
        display.progress(phase, 0, 4, None)
        if clock is not None:
            clock.seconds += seconds
        display.progress(phase, 4, 4, 2.5 if phase == "train" else None)
    display.report("receipt", "receipt", verdict=verdict)
    display.report("traffic", "traffic", task="ab", bytes_down=10, bytes_up=70)


def test_figures_are_those_of_the_events(tmp_path: Path) -> None:
    heard, clock = Heard(), Clock()
    display = MeteredDisplay(heard, tmp_path / "gym.prom", clock)
    task(display, clock=clock)
    display.report("verdict", "merged", verdict="merged")
    display.report("balance", "balance", balance=40)
    display.report("away", "away")
    display.close()
    found = values((tmp_path / "gym.prom").read_bytes())
    assert found["gym_client_tasks_total", "received"] == found["gym_client_tasks_total", "answered"] == 1
    assert found["gym_client_tasks_total", "failed"] == 0
    assert found["gym_client_verdicts_total", "merged"] == found["gym_client_verdicts_total", "admitted"] == 1
    assert (found["gym_client_bytes_total", "down"], found["gym_client_bytes_total", "up"]) == (10, 70)
    assert found["gym_client_phase_seconds_total", "train"] == 30
    assert found["gym_client_phase_seconds_total", "upload"] == 5
    assert found["gym_client_train_loss",] == 2.5
    assert found["gym_client_balance_credits",] == 40
    assert found["gym_client_hub_reachable",] == 0
    assert found["gym_client_last_event_timestamp_seconds",] == clock.seconds
    assert {name.removesuffix("_total") for name, *_ in found} == {row.name for row in ROWS}
    assert heard.events == ["task", "receipt", "traffic", "verdict", "balance", "away"]
    assert heard.closed


def test_words_of_a_hub_are_no_labels(tmp_path: Path) -> None:
    display = MeteredDisplay(Heard())
    for number in range(1000):
        display.report("verdict", "x", verdict=f"made-up-{number}")
        display.progress(f"phase {number}", 0, 1, None)
    display.report("verdict", "x", verdict=["a", "list"])
    found = values(display.exposition())
    assert found["gym_client_verdicts_total", "other"] == 1001
    assert {labels[0] for name, *labels in found if name == "gym_client_verdicts_total"} == {
        *VERDICTS,
        "other",
    }
    assert {labels[0] for name, *labels in found if name == "gym_client_phase_seconds_total"} <= {
        *PHASES,
        "other",
    }


def test_a_file_that_cannot_be_written_is_reported_once_and_ends_nothing(tmp_path: Path) -> None:
    heard, clock = Heard(), Clock()
    (tmp_path / "file").touch()
    display = MeteredDisplay(heard, tmp_path / "file" / "gym.prom", clock)
    for _ in range(3):
        clock.seconds += 60
        display.report("waiting", "waiting")
    assert heard.events == ["waiting", "warning", "waiting", "waiting"]


def test_the_port_answers_this_machine_and_no_page_of_another_name() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with served(lambda: b"gym_client_up 1\n", port):
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/metrics").text == "gym_client_up 1\n"
        assert httpx.get(f"{url}/metrics", headers={"Host": "evil.example"}).status_code == 404
        assert httpx.get(f"{url}/other").status_code == 404
        with (
            pytest.raises(GymError, match=rf"observe\.port: 127\.0\.0\.1:{port}") as refused,
            served(bytes, port),
        ):
            pass
    assert refused.value.code is ErrorCode.ADDRESS_IN_USE
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/metrics")


def test_by_default_the_display_stays_as_it_is() -> None:
    display = Heard()
    with observed(Policy().observe, display) as shown:
        assert shown is display
    assert not tracing.is_tracing()


def test_a_textfile_needs_its_folder_and_its_suffix(tmp_path: Path) -> None:
    with (
        pytest.raises(GymError, match="no folder") as refused,
        observed(ObservePolicy(textfile=tmp_path / "gone" / "a.prom"), Heard()),
    ):
        pass
    assert refused.value.code is ErrorCode.FILE_NOT_FOUND
    path = tmp_path / "policy.yaml"
    path.write_text("observe: {textfile: /tmp/a.txt}\n")
    with pytest.raises(GymError, match=r"policy\.yaml:1.*end in \.prom"):
        Policy.load(path)


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:4317", "http://host", "ftp://h:1", "http://h:1/v1/traces", "http://u:p@h:1", "http://h:x"],
)
def test_an_endpoint_that_is_none_is_refused_with_an_example(tmp_path: Path, url: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(f"observe: {{otlp_endpoint: '{url}'}}\n")
    with pytest.raises(GymError, match="otlp_endpoint"):
        Policy.load(path)


@needs_otlp
def test_a_task_is_a_span_below_its_round_with_one_for_each_phase() -> None:
    receiver, heard = OtlpReceiver(), Heard()
    with observed(ObservePolicy(otlp_endpoint=receiver.url), heard) as display:
        assert isinstance(display, TracedDisplay)
        display.report("task", "round 4", task="ab", group="4", server="s1")
        display.progress("train", 0, 4, None)
        ((key, carried),) = tracing.outgoing_metadata()
        display.close()
        assert tracing.outgoing_metadata() == ()
        task(display)
    assert tracing.outgoing_metadata() == ()
    spans = [span for service, span in receiver.spans if service == "gym-client"]
    receiver.close()
    trace = tracing.RoundTrace.of("s1", 4)
    assert {span.trace_id for span in spans} == {trace.trace_id.to_bytes(16)}
    first, second = (span for span in spans if span.name == "task")
    assert attributes_of(first) == {"gym.outcome": "stopped"}
    assert attributes_of(second) == {"gym.outcome": "receipt", "gym.verdict": "admitted"}
    assert first.parent_span_id == second.parent_span_id == trace.root_id.to_bytes(8)
    below = [span.name for span in spans if span.parent_span_id == second.span_id]
    assert below == ["fetch", "train", "encode", "upload"]
    (cut,) = (span for span in spans if span.parent_span_id == first.span_id)
    assert (key, trace.parent(carried)) == ("traceparent", int.from_bytes(cut.span_id))
