"""Rate limits of keys: refilling buckets, OpenAI's headers, and bounded state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from gym_fed.config.serving import StoredAnswersConfig
from gym_fed.serving.http.keys import Authenticator, KeyFile
from gym_fed.serving.http.rate_limits import RateLimited, RateLimits
from gym_fed.serving.openai.catalogue import Caller
from gym_fed.serving.openai.responses import RESPONSES
from gym_fed.serving.openai.service import CHAT, COMPLETIONS, STORED
from gym_fed.serving.openai.stored_answers import StoredAnswers
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.serving.test_api_app import client_of, gateway_over


def limits_at(seconds: list[float]) -> RateLimits:
    return RateLimits(lambda: seconds[0])


def test_requests_come_back_one_by_one_within_the_minute() -> None:
    clock = [100.0]
    limits, ann = limits_at(clock), Caller("ann", requests_per_minute=2)
    assert limits.admit(ann)["x-ratelimit-remaining-requests"] == "1"
    assert limits.admit(ann)["x-ratelimit-remaining-requests"] == "0"
    with pytest.raises(RateLimited, match="2 requests per minute") as caught:
        limits.admit(ann)
    assert caught.value.retry_after == 30
    assert limits.admit(Caller("bob", requests_per_minute=2)), "another key has its own share"
    clock[0] += 30
    headers = limits.admit(ann)
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-reset-requests"] == "1m0s"
    with pytest.raises(RateLimited):
        limits.admit(ann)


def test_tokens_beyond_the_share_are_owed_and_paid_by_waiting() -> None:
    clock = [0.0]
    limits, ann = limits_at(clock), Caller("ann", tokens_per_minute=60)
    limits.admit(ann)
    limits.spend(ann, 90)
    with pytest.raises(RateLimited, match="60 tokens per minute") as caught:
        limits.admit(ann)
    assert caught.value.headers["x-ratelimit-remaining-tokens"] == "0"
    assert caught.value.retry_after in (30, 31)
    clock[0] += caught.value.retry_after + 1
    assert limits.admit(ann)["x-ratelimit-reset-tokens"] != "0ms"
    clock[0] += 3600
    assert limits.admit(ann)["x-ratelimit-remaining-tokens"] == "60", "no more than a minute's share is saved"


def test_a_refused_request_takes_nothing() -> None:
    clock = [0.0]
    limits, ann = limits_at(clock), Caller("ann", requests_per_minute=5, tokens_per_minute=10)
    limits.admit(ann)
    limits.spend(ann, 20)
    for _ in range(10):
        with pytest.raises(RateLimited) as caught:
            limits.admit(ann)
        assert caught.value.headers["x-ratelimit-remaining-requests"] == "4"


def test_buckets_that_are_full_again_are_forgotten_and_debts_are_not() -> None:
    clock = [0.0]
    limits, debtor = limits_at(clock), Caller("debtor", tokens_per_minute=1)
    limits.spend(debtor, 10_000)
    for number in range(5000):
        clock[0] += 1
        limits.admit(Caller(f"key{number}", requests_per_minute=10))
    assert len(limits) < 1200
    with pytest.raises(RateLimited):
        limits.admit(debtor)


def test_a_key_that_was_made_again_under_a_name_has_shares_of_its_own() -> None:
    limits = RateLimits(lambda: 0.0)
    old = Caller("ann", requests_per_minute=1, tokens_per_minute=10, key_sha256="1")
    limits.admit(old)
    limits.spend(old, 1000)
    with pytest.raises(RateLimited):
        limits.admit(old)
    assert limits.admit(replace(old, key_sha256="2"))["x-ratelimit-remaining-tokens"] == "10"


def test_a_key_without_limits_has_neither_headers_nor_state() -> None:
    limits = RateLimits()
    assert limits.admit(Caller("ann")) == {}
    limits.spend(Caller("ann"), 10)
    assert len(limits) == 0


async def test_the_server_counts_requests_and_tokens_of_whole_and_streamed_answers(tmp_path: Path) -> None:
    gateway = gateway_over(ScriptedEngine())
    gateway.limits = RateLimits(now=lambda: 0.0)  # nothing fills again meanwhile
    keys = KeyFile(tmp_path / "keys.json")
    gateway.authenticator = Authenticator(keys)
    gateway.serving.config = SimpleNamespace(adapters_folder=None)  # type: ignore[union-attr]
    key = keys.add("ann", requests_per_minute=3, tokens_per_minute=10_000)
    body = {"model": "nano", "prompt": "abc"}
    async with client_of(gateway) as client:
        client.headers["authorization"] = f"Bearer {key}"

        async def ask(**more: object) -> httpx.Response:
            return await client.post(COMPLETIONS, json={**body, **more})

        whole, stream = await ask(), await ask(stream=True)
        used = whole.json()["usage"]["total_tokens"]
        left = [int(one.headers["x-ratelimit-remaining-tokens"]) for one in (whole, stream)]
        assert left == [10_000, 10_000 - used]
        last = await client.post("/tokenize", json={"prompt": "abc"})
        assert int(last.headers["x-ratelimit-remaining-tokens"]) == 10_000 - 2 * used
        refused = await ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["x-ratelimit-limit-requests"] == "3"
        assert (await client.get("/v1/models")).status_code == 200, "listing costs nothing"


@pytest.mark.parametrize("url", [RESPONSES, CHAT])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_reading_and_deleting_what_is_stored_takes_a_request(
    tmp_path: Path, url: str, method: str
) -> None:
    gateway = gateway_over(ScriptedEngine())
    gateway.limits = RateLimits(now=lambda: 0.0)
    keys = KeyFile(tmp_path / "keys.json")
    gateway.authenticator = Authenticator(keys)
    stored = gateway.serving.service._stored = StoredAnswers(StoredAnswersConfig())  # type: ignore[union-attr]
    key = keys.add("ann", requests_per_minute=3)
    caller = keys.caller(key)
    assert caller is not None
    assert stored.put(caller, f"{STORED[url]}1", {"id": "1"})
    async with client_of(gateway) as client:
        client.headers["authorization"] = f"Bearer {key}"
        answers = [await client.request(method, f"{url}/{STORED[url]}1") for _ in range(4)]
    assert [answer.status_code for answer in answers] == (
        [200, 200, 200, 429] if method == "GET" else [200, 404, 404, 429]
    )
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "2"
    assert answers[0].json() == ({"id": "1"} if method == "GET" else {**answers[0].json(), "deleted": True})
