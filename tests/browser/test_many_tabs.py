"""Many tabs of one browser: each loads, and one that was hidden shows what happened meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.webui.app import open_webui
from gym_fed.webui.workbench import open_workbench
from tests.support import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Page

NUM_TABS = 8
"""A browser opens six connections to one server, for all its tabs together; a stream takes one."""
HIDDEN = "Object.defineProperty(document, 'hidden', {get: () => !window.isSeen})"
SEE = "() => { window.isSeen = true; document.dispatchEvent(new Event('visibilitychange')); }"


def test_eight_tabs_load_and_a_hidden_one_is_up_to_date_when_it_is_seen(
    tmp_path: Path, open_page: Callable[..., tuple[Page, chromium.Watch]]
) -> None:
    workbench = open_workbench(tmp_path, tmp_path / "runs")
    server = open_webui(workbench, "127.0.0.1:0", "bench")
    server.start()
    try:
        first, _ = open_page()
        first.goto(server.url)
        chromium.settled(first)
        first.context.add_init_script(HIDDEN)
        tabs = [first.context.new_page() for _ in range(NUM_TABS)]
        for tab in tabs:
            tab.goto(f"{server.address}/jobs")
            tab.get_by_text("No jobs have been started").wait_for()
        workbench.jobs.start(["gym", "--version"], title="the version")
        tabs[-1].evaluate(SEE)
        tabs[-1].get_by_role("link", name="the version").wait_for()
        tabs[-1].wait_for_selector("#connection[data-state=live]")
        assert tabs[0].get_by_text("No jobs have been started").count() == 1, "nobody sees it"
    finally:
        server.stop()
