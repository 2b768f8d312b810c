"""A round is one trace: spans of the hub and of the contributors that opted in, in one receiver of OTLP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.tracing import RoundTrace
from tests.support.federation import Federation
from tests.support.otlp import OtlpReceiver, attributes_of, needs_otlp
from tests.support.wait import until

pytestmark = [pytest.mark.slow, needs_otlp]

ROUNDS = 2
HUBS = {"round", "lease", "upload", "admit", "merge", "evaluate"}
CONTRIBUTORS = {"task", "train", "encode", "upload"}
"""Of the first round nothing is fetched."""


def test_a_round_is_one_trace_with_the_spans_of_hub_and_contributors(tmp_path: Path, tiny_base: Path) -> None:
    receiver = OtlpReceiver()
    federation = Federation(
        tmp_path,
        tiny_base,
        observe={"otlp_endpoint": receiver.url, "log_format": "json"},
        gate={"heldout": "heldout.jsonl", "max_examples": 4, "max_loss_increase": 100.0},
    )
    hub = federation.hub
    said = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "xx"}]}
    (hub.folder / "heldout.jsonl").write_text(4 * (json.dumps(said) + "\n"))
    policy = tmp_path / "ann" / "policy.yaml"
    policy.parent.mkdir()
    policy.write_text(f"observe: {{otlp_endpoint: '{receiver.url}'}}\n")
    try:
        hub.start("--exit-when-done")
        federation.join("ann")
        federation.join("bob")  # has not opted in
        federation.finish()
        until(lambda: sum(span.name == "round" for _, span in receiver.spans) >= ROUNDS, "the roots arrive")
    finally:
        federation.close()
        receiver.close()
    server = hub.ask("status")["server"]
    for number in range(1, ROUNDS + 1):
        check_round(receiver.spans, RoundTrace.of(server, number))
    lines = [json.loads(line) for line in hub.log().splitlines() if line.startswith("{")]
    assert all({"at", "level", "logger", "message"} <= line.keys() for line in lines)
    assert any(line["message"] == f"round {ROUNDS} committed" for line in lines)


def check_round(spans: list[tuple[str, Any]], trace: RoundTrace) -> None:
    """The spans of one round form one tree with the round at its root."""
    mine = [(service, span) for service, span in spans if span.trace_id == trace.trace_id.to_bytes(16)]
    named: dict[str, list[Any]] = {}
    for service, span in mine:
        named.setdefault(f"{service}/{span.name}", []).append(span)
    names = named.keys()
    assert {f"gym-hub/{name}" for name in HUBS} <= names
    assert {f"gym-client/{name}" for name in CONTRIBUTORS} <= names
    (root,) = named["gym-hub/round"]
    assert (root.parent_span_id, root.span_id) == (b"", trace.root_id.to_bytes(8))
    assert attributes_of(root)["gym.outcome"] == "committed"
    known = {span.span_id for _, span in mine}
    assert all(span.parent_span_id in known for _, span in mine if span is not root)
    (task,) = named["gym-client/task"]
    assert attributes_of(task) == {"gym.outcome": "receipt", "gym.verdict": "admitted"}
    for name in CONTRIBUTORS - {"task"}:
        assert {span.parent_span_id for span in named[f"gym-client/{name}"]} == {task.span_id}
    # Of both contributors the hub admits an update and ends a lease; one sent the span that its own is below.
    assert len(named["gym-hub/admit"]) == len(named["gym-hub/lease"]) == 2
    parents = {span.parent_span_id for span in named["gym-hub/admit"]}
    assert parents == {root.span_id, task.span_id}
    sent = {span.span_id for span in named["gym-client/upload"]}
    assert sent & {span.parent_span_id for span in named["gym-hub/upload"]}
    (merge,) = named["gym-hub/merge"]
    assert {span.parent_span_id for span in named["gym-hub/evaluate"]} == {merge.span_id}
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for _, span in mine)
