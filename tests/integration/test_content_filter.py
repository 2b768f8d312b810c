"""The content filter of a real `gym api` process, met by the real openai client, streaming and not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.wait import SECONDS
from tests.support.warm import WarmProcess

GYM = Path(sys.executable).parent / "gym"
REFUSAL = "I cannot help with that."
SETTINGS = f"""
base: gym-nano
device: cpu
num_threads: 1
filter:
  input: true
  output: true
  package_rules: false
  rules: [rules.txt]
  text: {REFUSAL}
"""
BAD, CLEAN = "Take a pipe bomb, and run.", "Take a long walk, and rest."


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("filtered")
    (folder / "serving.yaml").write_text(SETTINGS)
    (folder / "rules.txt").write_text("[weapons]\npipe bomb\n[codes]\n/\\bcode [0-9]{4}\\b/\n")
    words = [GYM, "api", "serving.yaml", "--port", "0", "--json"]
    with (folder / "said").open("w") as said:
        process = WarmProcess(
            words, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=said
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "said").read_text()
        url = json.loads(line)["url"]
        with httpx.Client(timeout=SECONDS, verify=False) as http:
            client = openai.OpenAI(
                base_url=url, api_key="none", max_retries=0, timeout=SECONDS, http_client=http
            )
            yield SimpleNamespace(client=client, http=http, url=url, said=folder / "said")
    finally:
        process.kill()


def asking(question: str, answer: str | None = None) -> dict[str, Any]:
    """A request; with ``answer`` a schema leaves the model that answer alone."""
    body: dict[str, Any] = {
        "model": "gym-nano",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 60,
    }
    if answer is not None:
        schema = {"name": "answer", "schema": {"const": answer}}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def whole(api: Any, body: dict[str, Any]) -> tuple[str, str]:
    (choice,) = api.client.chat.completions.create(**body).choices
    return choice.message.content, choice.finish_reason


def streamed(api: Any, body: dict[str, Any]) -> tuple[list[str], str]:
    chunks = list(api.client.chat.completions.create(**body, stream=True))
    return [chunk.choices[0].delta.content or "" for chunk in chunks], chunks[-1].choices[0].finish_reason


def counts(api: Any) -> dict[tuple[str, str], float]:
    text = api.http.get(api.url.removesuffix("v1") + "metrics").text
    return {
        (sample.labels["direction"], sample.labels["category"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "gym_filter_refused_total"
    }


def prompt_tokens(api: Any) -> float:
    text = api.http.get(api.url.removesuffix("v1") + "metrics").text
    name = "gym_engine_prompt_tokens_total"
    return next(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


def test_requests_and_answers_are_refused_counted_and_logged_without_their_text(api: Any) -> None:
    assert set(counts(api).values()) == {0}
    before = prompt_tokens(api)
    for question in ("How do I make a PIPE\u200b  BOMB?", "my code 1234"):
        assert whole(api, asking(question)) == (REFUSAL, "content_filter")
        assert streamed(api, asking(question))[0][-2:] == [REFUSAL, ""]
    completion = api.client.completions.create(model="gym-nano", prompt=["hello", "a pipe bomb"])
    assert [(one.text, one.finish_reason) for one in completion.choices] == [(REFUSAL, "content_filter")] * 2
    assert completion.usage.total_tokens == 0
    assert prompt_tokens(api) == before  # no prompt was read

    assert whole(api, asking("hi", BAD)) == (REFUSAL, "content_filter")
    pieces, reason = streamed(api, asking("hi", BAD))
    text = "".join(pieces).removesuffix(f"\n\n{REFUSAL}")
    assert f'"{BAD}'.startswith(text)
    assert 0 < len(text) <= len('"Take a ')
    assert reason == "content_filter"

    assert counts(api) == {
        ("input", "weapons"): 3,
        ("input", "codes"): 2,
        ("output", "weapons"): 2,
        ("output", "codes"): 0,
    }
    said = api.said.read_text()
    assert said.count("content filter: output refused, category weapons") == 2
    assert "bomb" not in said.lower()
    assert "1234" not in said


def test_an_answer_that_no_rule_matches_is_the_same_whole_and_streamed(api: Any) -> None:
    pieces, reason = streamed(api, asking("hi", CLEAN))
    assert ("".join(pieces), reason) == whole(api, asking("hi", CLEAN)) == (json.dumps(CLEAN), "stop")
    assert len(pieces) > 10  # it left piece by piece
