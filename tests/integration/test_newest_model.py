"""A hub's newest version with real processes: it is written, served, asked, in nobody's way, and gone with the hub."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import psutil
import pytest
from gym_server.federation import Federation
from gym_server.rounds.hub_model import write_version
from gym_server.web.dashboard import Dashboard
from gym_server.web.newest_model import FOLDER_NAME

from gym_fed.base.models import load_model
from gym_fed.core import child_process
from gym_fed.delta.base import tensors_digest
from gym_fed.web.access import CSRF_HEADER
from tests.support.private_hub import PrivateRounds, private_hub
from tests.support.wait import SECONDS, until


@pytest.mark.slow
def test_the_newest_version_is_written_served_and_asked_and_ends_with_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_LOW_PRIORITY", 10)  # 0 in the other tests
    dashboard = {"ask": True, "prompts": ["Reverse: abc"]}
    folder = private_hub(tmp_path / "hub", Path("gym-nano"), privacy=None, dashboard=dashboard)
    with Federation.open(folder) as fed:
        PrivateRounds(fed).run()
        others = set(psutil.Process().children())
        with (
            Dashboard(fed, "127.0.0.1:0", public=True, is_running=True) as pages,
            httpx.Client(base_url=pages.server.address, timeout=SECONDS, verify=False) as page,
        ):
            pages.start()
            page.get(pages.url.removeprefix(pages.server.address))
            page.headers[CSRF_HEADER] = page.get("/api/v1/session").json()["csrf"]

            def settled() -> dict[str, object]:
                found = page.get("/api/v1/model/newest").json()
                return found if found["phase"] in ("ready", "failed") else {}

            found = until(settled, "the newest version")
            assert found["phase"] == "ready", found["output"]
            [row] = found["prompts"]  # type: ignore[misc]
            [answer] = row["answers"]
            assert (answer["version"], answer["problem"]) == (1, "")
            written = folder / FOLDER_NAME / "model"
            assert found["bytes"] == sum(file.stat().st_size for file in written.iterdir())
            [child] = set(psutil.Process().children()) - others
            assert child.nice() == 10
            assert child.environ()["OMP_NUM_THREADS"] == "1"
            asked = {"prompt": "Reverse: abc"}
            with page.stream("POST", "/api/v1/model/newest/ask", json=asked) as response:
                events = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
            choices = [choice for event in events for choice in json.loads(event)["choices"]]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            assert text.startswith(answer["text"]), "the same prompt has the same answer"
        until(lambda: not child.is_running(), "the end of the process")
        exact = write_version(fed.state, fed.config, tmp_path / "exact")
        assert tensors_digest(load_model(str(written)).model) == exact["base_digest"]
