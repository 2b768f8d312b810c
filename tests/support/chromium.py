"""A real Chromium for the browser tests, and a watch on every page: what no page may do fails the test."""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Response

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
MOST_APART = 8
"""Of the three channels of one pixel, in a picture without colour."""
THEMES = ("light", "dark")
WIDTHS = (360, 1440)
HEIGHT = 900


def executable() -> str | None:
    """The browser: ``GYM_CHROMIUM``, or the first of ``NAMES`` on the PATH."""
    return os.environ.get("GYM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def why_not() -> str:
    """Why there can be no browser tests; empty where there can."""
    if find_spec("playwright") is None:
        return "playwright is not installed: make install"
    if executable() is None:
        return "no Chromium: apt-get install --no-install-recommends chromium-headless-shell"
    return ""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that ends with the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=executable(), args=list(ARGUMENTS))
        yield found
        found.close()


class Watch:
    """What a page did.

    Attributes:
        allowed: Patterns of problems that this test causes on purpose.
        requests: URLs, in order.
        num_bytes: Received over the wire, headers too.
    """

    def __init__(self, page: Page) -> None:
        self.allowed: list[str] = []
        self.requests: list[str] = []
        self.num_bytes = 0
        self._problems: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self._problems.append(f"page error: {error}"))
        page.on("response", self._on_response)
        wire = page.context.new_cdp_session(page)
        wire.send("Network.enable")
        wire.on("Network.requestWillBeSent", lambda event: self._on_request(event["request"]["url"]))
        wire.on("Network.dataReceived", lambda event: self._count(event["encodedDataLength"]))
        wire.on(
            "Network.responseReceived",
            lambda event: self._count(max(0, event["response"]["encodedDataLength"])),
        )

    def problems(self) -> list[str]:
        """Errors of the console and of scripts, requests to other hosts, answers of 500 and more."""
        return [one for one in self._problems if not any(re.search(known, one) for known in self.allowed)]

    def forget(self) -> None:
        """Count requests and bytes from here."""
        self.requests.clear()
        self.num_bytes = 0

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._problems.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _on_response(self, response: Response) -> None:
        if response.status >= 500:
            self._problems.append(f"{response.status} from {response.url}")

    def _on_request(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme in ("data", "blob"):
            return
        self.requests.append(url)
        if parts.hostname != "127.0.0.1":
            self._problems.append(f"request to another host: {url}")

    def _count(self, num_bytes: float) -> None:
        self.num_bytes += int(num_bytes)


def settled(page: Page) -> None:
    """Wait until a screen is shown: its module is loaded and nothing in it is still loading."""
    page.wait_for_selector("#main > .screen, #main > .state:not([role=status]), #main > form")
    page.wait_for_function("() => !document.querySelector('#main p.state[role=status]')")


def most_colourful(png: bytes) -> int:
    """How far the channels of one pixel are apart, at most: 0 for a picture in greys."""
    from PIL import Image

    channels = [np.asarray(channel) for channel in Image.open(BytesIO(png)).convert("RGB").split()]
    most, least = functools.reduce(np.maximum, channels), functools.reduce(np.minimum, channels)
    return int((most - least).max())


def looks(page: Page) -> Iterator[tuple[str, int, bytes]]:
    """The page in both themes at every width, with a picture of all of it."""
    for theme in THEMES:
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": HEIGHT})
            page.wait_for_timeout(60)  # charts draw again after a frame
            yield theme, width, page.screenshot(full_page=True)


def sticks_out(page: Page) -> list[str]:
    """Elements that make the page wider than its window; none where nothing scrolls sideways."""
    found: list[str] = page.evaluate(
        """async () => {
          for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);  // after a resize
          const width = document.documentElement.clientWidth;
          if (document.documentElement.scrollWidth <= width) return [];
          return [...document.querySelectorAll("body *")]
            .filter((node) => node.getBoundingClientRect().right > width + 1)
            .map((node) => node.outerHTML.slice(0, 120)).slice(-5);
        }"""
    )
    return found


def violations(page: Page) -> list[str]:
    """What axe-core, which the page has loaded, finds that is serious or critical: the rule, and where."""
    found: list[dict[str, Any]] = page.evaluate(
        "async () => (await axe.run(document, {resultTypes: ['violations']})).violations"
    )
    return [
        f"{one['id']}: {one['help']}: {node['html'][:160]} ({node.get('failureSummary', '')[:200]})"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"][:3]
    ]


REACHED = """() => {
  const visible = (node) => node.checkVisibility({visibilityProperty: true}) && node.getClientRects().length > 0;
  const controls = [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]")]
    .filter((node) => node.tabIndex >= 0 && !node.disabled && visible(node));
  const radios = new Set(), needed = controls.filter((node) => {
    if (node.type !== "radio") return true;  // one of a group takes the focus, arrows reach the others
    const group = `${node.form?.id}/${node.name}`;
    return !radios.has(group) && radios.add(group);
  });
  window.gymReached = {needed, seen: new Set(), bare: []};
  document.addEventListener("focusin", ({target}) => {
    const {outlineStyle, boxShadow} = getComputedStyle(target), {seen, bare} = window.gymReached;
    seen.add(target.type === "radio" ? needed.find((one) => one.name === target.name) : target);
    if (outlineStyle === "none" && boxShadow === "none") bare.push(`no focus ring: ${target.outerHTML.slice(0, 160)}`);
  });
  document.activeElement?.blur();
  return needed.length;
}"""


def unreached_by_keyboard(page: Page) -> list[str]:
    """Controls of a page that the Tab key never focuses, or that then look as before; none if all is well."""
    total = page.evaluate(REACHED)
    for _ in range(total + 5):
        page.keyboard.press("Tab")
    found: list[str] = page.evaluate(
        """() => [...window.gymReached.needed.filter((node) => node.isConnected && !window.gymReached.seen.has(node))
             .map((node) => `not reached: ${node.outerHTML.slice(0, 160)}`), ...window.gymReached.bare]"""
    )
    return found
