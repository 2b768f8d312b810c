"""Every HTTP route of `gym api`, the workbench, the dashboard and a contributor's page, with hostile requests.

No request may end in a status of 500 or above (503 means not available), or take long. Requests are made of random
parts, and by schemathesis of what the schemas of the bodies allow, which passes more of the checks.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
import schemathesis
from gym_client.identity.home import Home
from gym_client.web.app import open_ui
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from schemathesis import GenerationMode
from schemathesis.core import NotSet
from starlette.testclient import TestClient

from gym_fed.base.models import load_tokenizer
from gym_fed.config.serving import ServingConfig
from gym_fed.serving.http.app import create_app as create_api
from gym_fed.serving.http.gateway import Gateway
from gym_fed.serving.http.keys import Authenticator
from gym_fed.serving.openai.catalogue import Catalogue
from gym_fed.serving.openai.responses_request import ResponsesRequest
from gym_fed.serving.openai.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from gym_fed.serving.openai.service import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, OpenAIService
from gym_fed.serving.openai.tokenizing import DETOKENIZE, TOKENIZE, DetokenizeRequest, TokenizeRequest
from tests.support.hub_pages import HubPages
from tests.support.loopback_hub import LoopbackHub
from tests.support.scripted_engine import ScriptedEngine
from tests.support.webui_client import webui_client

SECONDS_A_REQUEST = 20.0
WORDS = (
    *(
        "model",
        "prompt",
        "messages",
        "role",
        "user",
        "content",
        "input",
        "stream",
        "tools",
        "max_tokens",
        "nano",
    ),
    *(
        "temperature",
        "stop",
        "logit_bias",
        "response_format",
        "n",
        "type",
        "text",
        "previous_response_id",
        "echo",
    ),
)
NASTY = (
    *("", "../../etc/passwd", "%2e%2e%2f", "\x00", "a\u202eb", "9" * 5000, "-1", "1e999", "NaN", "[" * 2000),
    *(
        "<script>",
        "' OR 1=1 --",
        "{{7*7}}",
        "file:///etc/passwd",
        "\\\\host\\share",
        "c" + "0" * 32,
        "gym-nano",
    ),
)
TEXTS = st.one_of(st.sampled_from(NASTY), st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=True))
EXAMPLES = int(os.environ.get("GYM_HTTP_EXAMPLES", "150"))
SETTINGS = settings(max_examples=EXAMPLES, derandomize=True, suppress_health_check=list(HealthCheck))
EXAMPLES_BY_SCHEMA = int(os.environ.get("GYM_SCHEMA_EXAMPLES", "60"))
NOT_FUZZED = {"/events"}
"""A stream has no end; its limits have tests of their own."""


def routes_of(client: TestClient) -> list[tuple[str, str]]:
    """Return methods and paths."""
    app: Any = client.app
    if hasattr(app, "openapi"):
        paths = app.openapi()["paths"]
        found = [(method.upper(), path) for path, calls in paths.items() for method in calls]
    else:
        found = [(method, route.path) for route in app.routes for method in sorted(route.methods - {"HEAD"})]
    assert len(found) > 10
    return [one for one in found if one[1] not in NOT_FUZZED]


def names_of(client: TestClient) -> list[str]:
    """Names of the fields and parameters that the application reads."""
    app: Any = client.app
    if not hasattr(app, "openapi"):
        return list(WORDS)
    schema = app.openapi()
    bodies = schema.get("components", {}).get("schemas", {}).values()
    fields = {name for body in bodies for name in body.get("properties", {})}
    calls = [call for path in schema["paths"].values() for call in path.values()]
    return sorted(fields | {one["name"] for call in calls for one in call.get("parameters", [])})


def attack(client: TestClient) -> None:
    names, routes = names_of(client), routes_of(client)
    values = st.recursive(
        st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.sampled_from(names)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.one_of(st.sampled_from(names), TEXTS), inner, max_size=6),
        ),
        max_leaves=12,
    )
    bodies = st.one_of(
        st.dictionaries(st.sampled_from(names), values, max_size=8).map(
            lambda body: json.dumps(body).encode()
        ),
        st.binary(max_size=60),
        st.sampled_from(
            [b"", b"{" * 5000, b'{"a":' * 3000, b'{"model":"nano","prompt":"x"}', b"[]", b"null"]
        ),
    )

    @SETTINGS
    @given(
        route=st.sampled_from(routes),
        texts=st.lists(TEXTS, min_size=4, max_size=4),
        query=st.dictionaries(st.sampled_from(names), TEXTS, max_size=4),
        headers=st.dictionaries(
            st.sampled_from(
                ["content-type", "authorization", "range", "last-event-id", "if-none-match", "accept"]
            ),
            st.sampled_from(["", "application/json", "Bearer x", "bytes=9-1", "-1", "\x80\xff", "a" * 5000]),
        ),
        body=bodies,
    )
    def send(
        route: tuple[str, str], texts: list[str], query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> None:
        method, path = route
        parts = [
            quote(texts[n % 4], safe="%") if part.startswith("{") else part
            for n, part in enumerate(path.split("/"))
        ]
        began = time.monotonic()
        answer = client.request(
            method,
            "/".join(parts) or "/",
            params=query,
            headers={key: value.encode("latin-1") for key, value in headers.items()},  # type: ignore[misc]
            content=None if method == "GET" else body,
            follow_redirects=False,
        )
        assert answer.status_code < 500 or answer.status_code == 503, answer.text[:500]
        assert time.monotonic() - began < SECONDS_A_REQUEST

    send()


def attack_by_schema(
    client: TestClient, document: dict[str, Any], examples: int = EXAMPLES_BY_SCHEMA
) -> Counter[int]:
    """Send valid and invalid requests to every route of an OpenAPI document; return the number of each status."""
    statuses = Counter[int]()
    modes = st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    calls = [
        one.ok()
        for one in schemathesis.openapi.from_dict(document).get_all_operations()
        if one.ok().path not in NOT_FUZZED
    ]

    @settings(SETTINGS, max_examples=examples, phases=[Phase.generate])
    @given(data=st.data())
    def send(data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(calls))
        case = data.draw(call.as_strategy(generation_mode=data.draw(modes)))
        began = time.monotonic()
        answer = client.request(
            case.method,
            case.formatted_path,
            params={key: str(value) for key, value in (case.query or {}).items()},
            headers={"content-type": "application/json"},
            content=None if isinstance(case.body, NotSet) else json.dumps(case.body, default=str).encode(),
            follow_redirects=False,
        )
        statuses[answer.status_code] += 1
        assert answer.status_code < 500 or answer.status_code == 503, answer.text[:500]
        assert time.monotonic() - began < SECONDS_A_REQUEST

    send()
    return statuses


_REFUSED_HERE = (
    *("thinking_token_budget", "thinking_budget", "add_generation_prompt", "continue_final_message"),
    *("guided_decoding_backend", "guided_whitespace_pattern"),
)


def api_document() -> dict[str, Any]:
    """Describe the calls of `gym api` that have a body, as OpenAPI."""
    bodies: dict[str, type[BaseModel]] = {
        CHAT: ChatRequest,
        COMPLETIONS: CompletionRequest,
        EMBEDDINGS: EmbeddingRequest,
        RESPONSES: ResponsesRequest,
        TOKENIZE: TokenizeRequest,
        DETOKENIZE: DetokenizeRequest,
    }
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for url, model in bodies.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {"const": "nano"}
        for key in _REFUSED_HERE:
            schema["properties"].pop(key, None)
        paths[url] = {
            "post": {
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"default": {"description": "an answer or an error"}},
            }
        }
    info = {"title": "gym api", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def api_client() -> TestClient:
    engine, tokenizer = ScriptedEngine(), load_tokenizer("gym-nano")
    gateway = Gateway(Authenticator(None), request_timeout_seconds=60.0)
    service = OpenAIService(
        engine, Catalogue("nano"), tokenizer, vocab_size=len(tokenizer), fingerprint="fp_1", max_at_once=20
    )
    gateway.serving = SimpleNamespace(  # type: ignore[assignment]
        service=service,
        engine=engine,
        store=None,
        usage_log=None,
        content_filter=None,
        config=ServingConfig(),
    )
    return TestClient(create_api(gateway), base_url="http://localhost", raise_server_exceptions=False)


def test_no_request_makes_gym_api_fail() -> None:
    attack(api_client())


def test_no_request_of_its_schema_makes_gym_api_fail() -> None:
    examples = 2 * EXAMPLES_BY_SCHEMA  # of few requests, the share of answered ones would be chance
    statuses = attack_by_schema(api_client(), api_document(), examples)
    assert statuses[200] > examples / 20, f"too few requests were answered: {statuses}"


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[HubPages]:
    hub = LoopbackHub(tmp_path / "hub")
    yield HubPages(hub.fed)
    hub.close()


@pytest.mark.parametrize("who", ["viewer", "operator"])
def test_no_request_makes_a_hubs_dashboard_fail(pages: HubPages, who: str) -> None:
    client = pages.viewer if who == "viewer" else pages.operator
    if who == "operator":
        client.headers["X-CSRF-Token"] = client.get("/api/v1/session").json()["csrf"]
    attack(client)
    attack_by_schema(client, client.app.openapi())  # type: ignore[attr-defined]


@pytest.mark.parametrize("login", [False, True])
def test_no_request_makes_the_workbench_fail(tmp_path: Path, login: bool) -> None:
    client = webui_client(tmp_path, login=login)
    attack(client)
    attack_by_schema(client, client.app.openapi())  # type: ignore[attr-defined]


@pytest.mark.slow
def test_no_request_makes_a_contributors_page_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):  # a link handler would be registered there
        monkeypatch.setenv(name, str(tmp_path))
    server, _ = open_ui(Home.open(tmp_path / "home"), "127.0.0.1:0")
    client = TestClient(server.app, base_url=server.address, raise_server_exceptions=False)
    assert client.post("/api/v1/login", json={"key": server.url.partition("token=")[2]}).status_code == 200
    client.headers["X-CSRF-Token"] = client.get("/api/v1/session").json()["csrf"]
    attack(client)
    attack_by_schema(client, client.app.openapi())  # type: ignore[attr-defined]
    server.stop()
