"""Workbench, dashboard and API below a path prefix, behind nginx: login, every screen, live events, other origins."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gym_fed.serving.http.keys import KeyFile
from gym_fed.serving.http.proxies import Proxies
from tests.browser.test_every_screen import keep
from tests.support import chromium
from tests.support import nginx as nginx_server
from tests.support.screens import screens
from tests.support.warm import WarmProcess

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.skipif(bool(nginx_server.why_not()), reason=nginx_server.why_not())

ASK = """async ([url, key, model]) => {
  const response = await fetch(`${url}/v1/completions`, {
    method: "POST",
    headers: {"Content-Type": "application/json", Authorization: `Bearer ${key}`, "X-Stainless-Lang": "js"},
    body: JSON.stringify({model, prompt: "x", max_tokens: 2}),
  });
  return [response.status, (await response.json()).object?.replace("text_", "") ?? null];
}"""
Open = Callable[..., tuple["Page", chromium.Watch]]
Start = Callable[[Proxies], tuple[str, str]]
GYM = Path(sys.executable).parent / "gym"
PREFIX = {"webui": "/tools/gym", "hub": "/hub"}


@pytest.fixture
def start(trained: Path, played: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts the face of the test's parameter behind proxies: its address and an operator's key."""
    from gym_server.federation import Federation
    from gym_server.web.dashboard import Dashboard

    from gym_fed.web.access import KEYS_NAME, WebKeys
    from gym_fed.webui.app import open_webui
    from gym_fed.webui.workbench import open_workbench

    ends: list[Callable[[], object]] = []

    def webui(proxies: Proxies) -> tuple[str, str]:
        shutil.copytree(trained, tmp_path / "bench")
        workbench = open_workbench(tmp_path / "bench", tmp_path / "bench/runs")
        key = WebKeys(tmp_path / "bench/runs" / KEYS_NAME).add("otto", "operator")
        server = open_webui(workbench, "127.0.0.1:0", "bench", proxies)
        server.start()
        ends.append(server.stop)
        return server.address, key

    def hub(proxies: Proxies) -> tuple[str, str]:
        shutil.copytree(played, tmp_path / "hub")
        key = WebKeys(tmp_path / "hub/keys" / KEYS_NAME).add("otto", "operator")
        fed = Federation.open(tmp_path / "hub")
        ends.append(fed.close)
        dashboard = Dashboard(fed, "127.0.0.1:0", public=False, is_running=False, proxies=proxies)
        dashboard.start()
        ends.append(dashboard.stop)
        return dashboard.server.address, key

    yield {"webui": webui, "hub": hub}[request.node.callspec.params["face"]]
    for end in reversed(ends):
        end()


@pytest.mark.parametrize(
    ("face", "removes_prefix"),
    [
        pytest.param("webui", True, id="webui-stripped"),
        pytest.param("hub", False, id="hub-kept"),
        pytest.param("webui", False, id="webui-kept", marks=pytest.mark.slow),
        pytest.param("hub", True, id="hub-stripped", marks=pytest.mark.slow),
    ],
)
def test_behind_nginx_every_screen_works_below_a_prefix(
    face: str, removes_prefix: bool, start: Start, tmp_path: Path, open_page: Open
) -> None:
    prefix = PREFIX[face]
    trusted = ("127.0.0.1/32",)
    address, key = start(Proxies(trusted=trusted) if removes_prefix else Proxies(prefix, trusted))
    with nginx_server.nginx(tmp_path / "nginx", {prefix: address}, removes_prefix=removes_prefix) as site:
        page, watch = open_page()
        page.goto(f"{site}{prefix}/")
        page.get_by_label("Key, or the token in the printed URL").fill(key)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_selector("#connection[data-state=live]")
        chromium.settled(page)
        keep(page.screenshot(), f"nginx-{face}-{'stripped' if removes_prefix else 'kept'}")
        assert [cookie["path"] for cookie in page.context.cookies()] == [prefix]

        links = page.locator("header.top nav a")
        for at in range(links.count()):
            links.nth(at).click()
            chromium.settled(page)
            assert links.nth(at).get_attribute("aria-current") == "page"
            assert page.url.startswith(f"{site}{prefix}/")
            assert page.locator("#main .state.failed").count() == 0, page.inner_text("#main")
        plain = [
            screen for screen in screens() if screen.face == face and not set(":*") & set(screen.pattern)
        ]
        for screen in plain:
            page.goto(f"{site}{prefix}{screen.pattern}")
            chromium.settled(page)
            assert page.locator("#main .state.failed").count() == 0, page.inner_text("#main")
        outside = [url for url in watch.requests if not url.startswith(f"{site}{prefix}/")]
        assert outside == []


def test_a_page_of_another_origin_calls_the_api_through_nginx(tmp_path: Path, open_page: Open) -> None:
    key = KeyFile(tmp_path / "keys.json").add("anna")
    html = '<!doctype html><link rel="icon" href="data:,"><title>chat</title>'
    with nginx_server.nginx(tmp_path / "site", {}, page=html) as origin:
        words = [GYM, "api", "--port", "0", "--json", "--set", "variants=null", "--api-keys", "keys.json"]
        words += ["--trusted-proxy", "127.0.0.1", "--cors-origin", origin]
        process = WarmProcess(words, cwd=tmp_path, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            served = json.loads(process.stdout.readline())
            address = served["url"].removesuffix("/v1")
            with nginx_server.nginx(tmp_path / "api", {"/llm": address}, removes_prefix=True) as site:
                page, watch = open_page()
                page.goto(f"{origin}/")
                asked = [f"{site}/llm", key, served["model"]]
                assert page.evaluate(ASK, asked) == [200, "completion"]
                assert page.evaluate(ASK, [asked[0], "gym-wrong", asked[2]]) == [401, None]
                watch.allowed.append("401")
        finally:
            process.kill()
