"""Judges and reward servers over real sockets: retries, caches, keys, and answers that are refused."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.base import Grader, Sample
from gym_fed.evaluation.graders.exact import Exact, ExactConfig
from gym_fed.evaluation.graders.judge import Judge, JudgeConfig
from gym_fed.evaluation.graders.length import Length, LengthConfig
from gym_fed.evaluation.graders.remote import Remote, RemoteConfig, reward_server
from tests.support.wait import SECONDS


class Endpoint:
    """A server that answers with what ``replies`` holds next, then with its last for ever."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, Any]] = []
        self.seen: list[tuple[dict[str, str], Any]] = []
        self.delay_seconds = 0.0
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.seen.append(({key.lower(): value for key, value in self.headers.items()}, body))
                    status, content = outer.replies.pop(0) if len(outer.replies) > 1 else outer.replies[0]
                time.sleep(outer.delay_seconds)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who asked has gone
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_fed.evaluation.graders.remote._FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)


def chat(content: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "judge",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
    }


def grade(grader: Grader, *samples: Sample) -> list[float]:
    grader.setup()
    try:
        return grader.grade(samples)
    finally:
        grader.teardown()


def judge(endpoint: Endpoint, **keys: Any) -> Judge:
    return Judge(JudgeConfig(grader="judge", model="m", base_url=f"{endpoint.url}/v1", **keys))


SAMPLE = Sample([{"role": "user", "content": "2 + 2?"}], "It is {answer}, I think: 4", {"answer": "four"})


def test_the_judge_is_asked_again_after_failures_and_its_score_scaled(endpoint: Endpoint) -> None:
    endpoint.replies = [(500, {}), (429, {}), (200, chat("Right. Score: 3 no,\nScore: 7.5"))]
    assert grade(judge(endpoint, max_tokens=77), SAMPLE) == [0.75]
    assert len(endpoint.seen) == 3
    asked = endpoint.seen[-1][1]["messages"][0]["content"]
    assert "2 + 2?" in asked
    assert "four" in asked
    assert "It is {answer}, I think: 4" in asked  # what the answer says is no template
    assert endpoint.seen[-1][1]["temperature"] == 0
    assert endpoint.seen[-1][1]["max_tokens"] == 77


def test_the_judge_gives_up_after_its_retries(endpoint: Endpoint) -> None:
    endpoint.replies = [(503, {})]
    with pytest.raises(GymError, match="answered with status 503") as info:
        grade(judge(endpoint, retries=2), SAMPLE)
    assert info.value.code is ErrorCode.UNAVAILABLE
    assert len(endpoint.seen) == 3


def test_the_cache_answers_when_the_judge_is_gone(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.replies = [(200, chat("Score: 10"))]
    keys = {"cache": tmp_path / "deep" / "judge.sqlite", "retries": 0}
    assert grade(judge(endpoint, **keys), SAMPLE) == [1.0]
    endpoint.close()
    assert grade(judge(endpoint, **keys), SAMPLE) == [1.0]
    other = Sample(SAMPLE.prompt, "5", SAMPLE.row)
    with pytest.raises(GymError, match="cannot be reached") as info:
        grade(judge(endpoint, **keys), other)
    assert info.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(GymError, match="cannot be reached"):
        grade(judge(endpoint, **keys, temperature=0.5), SAMPLE)


def test_the_same_answer_is_judged_once_even_in_one_batch_without_a_file(endpoint: Endpoint) -> None:
    endpoint.replies = [(200, chat("Score: 5"))]
    grader = judge(endpoint)
    grader.setup()
    assert grader.grade([SAMPLE, SAMPLE]) == [0.5, 0.5]
    assert grader.grade([SAMPLE]) == [0.5]
    grader.teardown()
    assert len(endpoint.seen) == 1


def test_the_judges_key_comes_from_the_environment_and_goes_nowhere_else(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GymError, match=r"environment variable JUDGE_KEY \(api_key_env\) is not set"):
        judge(endpoint, api_key_env="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    endpoint.replies = [(200, chat("Score: 5")), (401, {"error": {"message": "bad key"}})]
    file = tmp_path / "judge.sqlite"
    grader = judge(endpoint, api_key_env="JUDGE_KEY", cache=file)
    grade(grader, SAMPLE)
    assert endpoint.seen[0][0]["authorization"] == "Bearer sk-very-secret"
    assert "sk-very-secret" not in grader.config.model_dump_json()
    assert b"sk-very-secret" not in file.read_bytes()
    with pytest.raises(GymError) as info:
        grade(grader, Sample("", "other"))
    assert info.value.code is ErrorCode.UNAUTHENTICATED
    assert "sk-very-secret" not in str(info.value)


@pytest.mark.parametrize("said", ["I like it", "Score: 11", "Score: -1"])
def test_a_judge_without_a_score_in_range_is_an_error_unless_a_value_is_set(
    endpoint: Endpoint, said: str
) -> None:
    endpoint.replies = [(200, chat(said))]
    with pytest.raises(GymError, match="returned no score from 0 to 10"):
        grade(judge(endpoint), SAMPLE)
    assert grade(judge(endpoint, unscored_reward=0.1), SAMPLE) == [0.1]


def test_prompt_pattern_and_range_of_the_judge_can_be_set(endpoint: Endpoint) -> None:
    endpoint.replies = [(200, chat("<v>4</v>"))]
    keys = {"prompt": "Rate {completion} 1-5", "score_pattern": r"<v>(\d)</v>", "score_range": (1.0, 5.0)}
    assert grade(judge(endpoint, **keys), Sample("q", "this")) == [0.75]
    assert endpoint.seen[0][1]["messages"] == [{"role": "user", "content": "Rate this 1-5"}]


def test_a_score_pattern_that_takes_for_ever_is_an_error(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.evaluation.graders.judge._SEARCH_SECONDS", 0.05)
    endpoint.replies = [(200, chat("a" * 60))]
    with pytest.raises(GymError, match=r"score_pattern .* takes more than") as raised:
        grade(judge(endpoint, score_pattern=r"^(a|aa)+(a|aa)+(a|aa)+b$|x\b(a*)*y"), SAMPLE)
    assert raised.value.code is ErrorCode.DATA_INVALID


def test_many_questions_keep_their_order(endpoint: Endpoint) -> None:
    endpoint.replies = [(200, chat("Score: 1"))]
    samples = [Sample("q", str(number)) for number in range(20)]
    assert grade(judge(endpoint, workers=4), *samples) == [0.1] * 20
    assert len(endpoint.seen) == 20


def test_an_endpoint_that_speaks_something_else_is_refused(endpoint: Endpoint) -> None:
    endpoint.replies = [(200, {"hello": "world"})]
    with pytest.raises(GymError, match="did not answer as a chat completion"):
        grade(judge(endpoint), SAMPLE)


def remote(url: str, **keys: Any) -> Remote:
    return Remote(RemoteConfig(grader="remote", url=url, **keys))


def test_graders_behind_a_reward_server_say_what_they_say_here() -> None:
    graders = [Exact(ExactConfig(grader="exact")), Length(LengthConfig(grader="length", max=2))]
    samples = [
        Sample([{"role": "user", "content": "é?"}], "yes", {"answer": "yes"}),
        Sample("q", "no it is not", {"answer": "yes"}),
        Sample("q", "no", {"answer": "yes"}),
    ]
    with reward_server(graders) as server:
        url = f"http://127.0.0.1:{server.server_port}/"
        assert grade(remote(url, batch_size=2), *samples) == [2.0, 0.0, 1.0]
        with pytest.raises(GymError, match="answered with status 422"):
            grade(remote(url), Sample("q", "no", {}))


def test_a_reward_server_answers_bad_requests_and_failing_graders() -> None:
    class Fails(Exact):
        def grade(self, samples: Any) -> list[float]:
            raise ZeroDivisionError("by nothing")

    def status(length: str, body: bytes) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", server.server_port, timeout=SECONDS)
        connection.request("POST", "/", body, {"Content-Length": length})
        answer = connection.getresponse()
        return answer.status, answer.read()

    with reward_server([Fails(ExactConfig(grader="exact"))]) as server:
        assert status("abc", b"")[0] == 400
        assert status("-1", b"")[0] == 400
        body = b'{"samples": [{"prompt": "q", "completion": "a"}]}'
        assert status(str(len(body)), body) == (
            500,
            b'{"message": "a grader failed: ZeroDivisionError: by nothing"}',
        )


def test_samples_are_posted_as_documented(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "t0ken")
    endpoint.replies = [(200, {"rewards": [0.5]})]
    assert grade(remote(endpoint.url, token_env="REWARD_TOKEN"), SAMPLE) == [0.5]
    headers, body = endpoint.seen[0]
    assert headers["authorization"] == "Bearer t0ken"
    assert body == {
        "samples": [{"prompt": SAMPLE.prompt, "completion": SAMPLE.completion, "row": {"answer": "four"}}]
    }


def test_the_reward_server_is_asked_again_after_failures_but_not_after_refusals(endpoint: Endpoint) -> None:
    endpoint.replies = [(500, {}), (429, {}), (200, {"rewards": [1]})]
    assert grade(remote(endpoint.url), SAMPLE) == [1.0]
    endpoint.seen.clear()
    endpoint.replies = [(404, {})]
    with pytest.raises(GymError, match="answered with status 404"):
        grade(remote(endpoint.url), SAMPLE)
    assert len(endpoint.seen) == 1


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"rewards": [1, 2]}, "2 rewards for 1 sample"),
        ({"rewards": []}, "0 rewards for 1 sample"),
        (b'{"rewards": [NaN]}', "a reward is not finite"),
        (b'{"rewards": [1e999]}', "a reward is not finite"),
        ({"rewards": ["1"]}, "the answer is not"),
        ({"rewards": [None]}, "the answer is not"),
        ({"rewards": 1}, "the answer is not"),
        ([1.0], "the answer is not"),
        (b"<html>", "the answer is not"),
    ],
)
def test_answers_that_are_no_rewards_are_refused(endpoint: Endpoint, answer: Any, problem: str) -> None:
    endpoint.replies = [(200, answer)]
    with pytest.raises(GymError, match=problem):
        grade(remote(endpoint.url), SAMPLE)


def test_sizes_are_capped_both_ways(endpoint: Endpoint) -> None:
    endpoint.replies = [(200, {"rewards": [1.0], "more": "x" * 5000})]
    with pytest.raises(GymError, match="max_response_bytes") as info:
        grade(remote(endpoint.url, max_response_bytes=1000), SAMPLE)
    assert info.value.code is ErrorCode.TOO_LARGE
    endpoint.seen.clear()
    with pytest.raises(GymError, match="max_request_bytes"):
        grade(remote(endpoint.url, max_request_bytes=20), SAMPLE)
    assert endpoint.seen == []


def test_rows_that_are_no_json_are_refused_before_anything_is_sent(endpoint: Endpoint) -> None:
    with pytest.raises(GymError, match="a row cannot be sent as JSON"):
        grade(remote(endpoint.url), Sample("q", "a", {"image": object()}))


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(GymError, match=r"http://127.0.0.1:9/ cannot be reached") as info:
        grade(remote("http://127.0.0.1:9/", retries=1), SAMPLE)
    assert info.value.code is ErrorCode.UNAVAILABLE


def test_endpoints_that_are_too_slow_are_given_up(endpoint: Endpoint) -> None:
    endpoint.replies = [(200, {**chat("Score: 5"), "rewards": [1.0]})]
    endpoint.delay_seconds = 1.0
    for slow in (
        judge(endpoint, timeout_seconds=0.1, retries=0),
        remote(endpoint.url, timeout_seconds=0.1, retries=0),
    ):
        with pytest.raises(GymError, match="did not answer in time") as info:
            grade(slow, SAMPLE)
        assert info.value.code is ErrorCode.DEADLINE_EXCEEDED
    endpoint.delay_seconds = 0.0
    assert grade(judge(endpoint), SAMPLE) == [0.5]
