"""Models behind an API whose server sends what none should: refused by name, and read up to a limit."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.scoring.api import ApiScorer
from gym_fed.evaluation.scoring.scorer import AnswerRequest, Continuation
from gym_fed.serving.chat import remote_writer

ASKED = Continuation((ord("a"),), (ord(" "), ord("b")))
CONVERSATION = AnswerRequest(tuple(map(ord, 'messages: [{"role": "user", "content": "x"}]')))


class Server(ThreadingHTTPServer):
    """Lists one model, and answers each request with ``reply``."""

    reply = b""
    asked = b""
    """The last request."""
    encoding = "identity"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._send(b'{"data": [{"id": "m"}]}', "identity")

    def do_POST(self) -> None:
        self.server.asked = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(self.server.reply, self.server.encoding)

    def _send(self, data: bytes, encoding: str) -> None:
        self.send_response(200)
        self.send_header("Content-Encoding", encoding)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.02,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture
def scorer(server: Server) -> Iterator[ApiScorer]:
    found = ApiScorer(f"http://127.0.0.1:{server.server_port}", "")
    yield found
    found.close()


def scored(logprob: str) -> bytes:
    return (
        '{"choices": [{"text": " ab", "logprobs": {"text_offset": [0, 1], '
        f'"token_logprobs": [null, {logprob}], "top_logprobs": [null, {{"a": -1}}]}}}}]}}'
    ).encode()


@pytest.mark.parametrize(
    ("logprob", "said"),
    [
        ("5.0", "logprobs that are above 0 or not numbers"),
        ("NaN", "logprobs that are above 0 or not numbers"),
        ("1" * 400, "no logprobs of its prompt"),
        ("[" * 20_000, "not an answer"),
    ],
)
def test_a_log_probability_that_is_none_is_refused(
    server: Server, scorer: ApiScorer, logprob: str, said: str
) -> None:
    server.reply = scored(logprob)
    with pytest.raises(GymError, match=said) as caught:
        list(scorer.loglikelihoods([ASKED]))
    assert caught.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(GymError, match="which these tasks need: cloze"):
        scorer.require_loglikelihoods(["cloze"])


def test_a_log_probability_is_that_of_the_continuation(server: Server, scorer: ApiScorer) -> None:
    server.reply = scored("-0.25")
    assert [found["m"].logprob for _, found in scorer.loglikelihoods([ASKED])] == [-0.25]


def test_an_answer_without_a_message_is_refused(server: Server, scorer: ApiScorer) -> None:
    server.reply = b'{"choices": [{"message": ["x"]}]}'
    with pytest.raises(GymError, match="the answer has no message") as caught:
        list(scorer.answers([CONVERSATION]))
    assert caught.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_the_thought_of_a_server_is_kept_apart_and_an_unfinished_one_is_an_empty_answer(
    server: Server, scorer: ApiScorer, field: str
) -> None:
    message = '{"choices": [{"message": {"content": %s, "' + field + '": "2+2"}, "finish_reason": "%s"}]}'
    for content, reason, text in (('"4"', "stop", "4"), ("null", "length", "")):
        server.reply = (message % (content, reason)).encode()
        ((_, found),) = scorer.answers([CONVERSATION])
        assert (found["m"].text, found["m"].thought) == (text, "2+2")
        assert found["m"].is_unfinished == (reason == "length")


def test_the_tags_of_a_server_without_a_parser_are_read(server: Server, scorer: ApiScorer) -> None:
    message = '{"choices": [{"message": {"content": "%s"}, "finish_reason": "%s"}]}'
    for content, reason, expected in (
        ("<think>2+2</think>4", "stop", ("4", "2+2", False)),
        ("<think>2+", "length", ("", "2+", True)),
        ("<think>2+", "stop", ("", "2+", True)),
        ("2+2</think>4", "stop", ("4", "2+2", False)),
        ("4 <think>", "stop", ("4 <think>", "", False)),
    ):
        server.reply = (message % (content, reason)).encode()
        ((_, found),) = scorer.answers([CONVERSATION])
        assert (found["m"].text, found["m"].thought, found["m"].is_unfinished) == expected


def test_stop_texts_are_sent_only_where_they_cannot_end_a_thought(server: Server, scorer: ApiScorer) -> None:
    asked = AnswerRequest(CONVERSATION.prompt_ids, until=(";",))
    server.reply = (
        b'{"choices": [{"message": {"content": "<think>a;b</think>4;5"}, "finish_reason": "length"}]}'
    )
    ((_, found),) = scorer.answers([asked])
    assert (found["m"].text, found["m"].thought, found["m"].finish_reason) == ("4", "a;b", "stop")
    assert b'"stop"' not in server.asked
    server.reply = b'{"choices": [{"message": {"content": "4", "reasoning": "a"}, "finish_reason": "stop"}]}'
    for is_sent in (False, True):  # only once its own field has shown that the server separates thoughts
        ((_, found),) = scorer.answers([asked])
        assert (b'"stop"' in server.asked) == is_sent


def test_an_answer_is_read_up_to_a_limit_whatever_it_unpacks_to(
    server: Server, scorer: ApiScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_writer, "MAX_ANSWER_BYTES", 100_000)
    text = b'{"choices": [{"text": "%s"}]}'
    server.encoding, server.reply = "gzip", gzip.compress(text % (b"x" * 90_000))
    assert len(next(scorer.answers([AnswerRequest((97,))]))[1]["m"].text) == 90_000
    server.reply = gzip.compress(text % (b"x" * 200_000))
    assert len(server.reply) < 1000
    with pytest.raises(GymError, match="answered with more than 100000 bytes") as caught:
        list(scorer.answers([AnswerRequest((97,))]))
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_an_answer_that_drips_is_given_up_after_its_time(
    server: Server, scorer: ApiScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.reply = scored("-1.0")
    assert scorer._score(ASKED).logprob == -1.0
    monkeypatch.setattr(remote_writer, "ANSWER_SECONDS", -1.0)  # it is over with the first byte
    with pytest.raises(GymError, match="did not end within") as caught:
        scorer._score(ASKED)
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_a_line_of_a_stream_has_a_limit_and_lines_end_as_events_do(
    server: Server, scorer: ApiScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_writer, "MAX_LINE_BYTES", 1000)
    chunks = [f'data: {{"n": "{mark}"}}' for mark in ("one", "\u2028")]
    server.reply = "\r\n\r\n".join([*chunks, "data: [DONE]"]).encode()
    assert list(scorer._writer.write("/v1/completions", {})) == [{"n": "one"}, {"n": "\u2028"}]
    server.reply = chunks[0].encode() + b"\n" + b"x" * 1001
    stream = scorer._writer.write("/v1/completions", {})
    with pytest.raises(GymError, match="a line of more than 1000 bytes") as caught:
        list(stream)
    assert caught.value.code is ErrorCode.UNAVAILABLE
