"""Web pages of other origins: preflight requests, methods, and who may call the API from a browser."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from gym_fed.config.serving import ServingConfig
from gym_fed.serving.http.app import create_app, with_cors
from gym_fed.serving.http.keys import Authenticator, KeyFile
from gym_fed.serving.http.proxies import BehindProxy, Proxies
from gym_fed.serving.openai.service import COMPLETIONS
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.serving.test_api_app import BODY, gateway_over

CHAT = "https://chat.example.org"
PREFLIGHT = {
    "Origin": CHAT,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


def browser(origins: list[str], keys: KeyFile | None = None, root_path: str = "") -> httpx.AsyncClient:
    gateway = gateway_over(ScriptedEngine())
    gateway.authenticator = Authenticator(keys, origins)
    app = BehindProxy(with_cors(create_app(gateway), origins), Proxies(root_path))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_a_page_of_a_named_origin_may_call_the_api_with_a_key(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("anna", requests_per_minute=9)
    async with browser([CHAT], keys) as client:
        preflight = await client.options(COMPLETIONS, headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == CHAT
        assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in preflight.headers
        sent = {"Origin": CHAT, "Authorization": f"Bearer {key}"}
        answer = await client.post(COMPLETIONS, json=BODY, headers=sent)
        assert answer.headers["access-control-allow-origin"] == CHAT
        assert "x-ratelimit-remaining-requests" in answer.headers
        assert "x-ratelimit-remaining-requests" in answer.headers["access-control-expose-headers"]
        refused = await client.post(COMPLETIONS, json=BODY, headers={"Origin": CHAT})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, CHAT)


async def test_a_page_of_another_origin_may_not() -> None:
    other = {**PREFLIGHT, "Origin": "https://evil.example.org"}
    for origins in ([], [CHAT]):
        async with browser(origins) as client:
            answers = [await client.options(COMPLETIONS, headers=other)]
            answers.append(await client.post(COMPLETIONS, json=BODY, headers={"Origin": other["Origin"]}))
            assert answers[1].status_code == 403
            assert not any("access-control-allow-origin" in answer.headers for answer in answers)


async def test_without_keys_a_page_of_a_named_origin_may() -> None:
    async with browser([CHAT]) as client:
        answer = await client.post(COMPLETIONS, json=BODY, headers={"Origin": CHAT})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, CHAT)


@pytest.mark.parametrize("origin", ["*", "null", f"{CHAT}/", f"{CHAT}/page", "chat.example.org", "https://"])
def test_an_origin_in_the_config_is_one_site(origin: str) -> None:
    with pytest.raises(ValidationError, match="origin"):
        ServingConfig(cors_origins=[origin])


def test_a_trusted_proxy_needs_keys() -> None:
    with pytest.raises(ValidationError, match="gym api keys add"):
        ServingConfig(trusted_proxies=["10.0.0.2"])


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (COMPLETIONS, "OPTIONS, POST"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/responses/resp_1", "DELETE, GET, HEAD, OPTIONS"),
    ],
)
async def test_options_names_the_methods_of_a_path_also_below_a_prefix(path: str, allowed: str) -> None:
    async with browser([], root_path="/gym") as client:
        for url in (path, f"/gym{path}"):
            answer = await client.options(url)
            assert (answer.status_code, answer.headers["allow"], answer.content) == (204, allowed, b"")
        wrong = await client.put(path)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, allowed)
        assert (await client.options("/nothing")).status_code == 404


async def test_head_is_answered_like_get_and_requests_below_a_prefix_are_measured() -> None:
    async with browser([], root_path="/gym") as client:
        assert (await client.head("/gym/v1/models")).status_code == 200
        assert (await client.post(f"/gym{COMPLETIONS}", json=BODY)).status_code == 200
        measured = (await client.get("/metrics")).text
        assert f'gym_api_requests_total{{route="{COMPLETIONS}",status="200"}} 1.0' in measured
