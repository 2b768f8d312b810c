"""A named pipe among the files of a run holds up no page: opening one would wait for a writer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.support.webui_client import webui_client

SECONDS = 20


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "performance.jsonl", "result.json", "spikes.json", ".lock"]
)
def test_a_pipe_in_the_place_of_a_file_holds_up_no_page(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "config.yaml").write_text("algorithm: sft\nmodel: gym-nano\noutput_dir: runs/a\n")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    client, found = webui_client(tmp_path), []

    def look() -> None:
        found.extend(client.get(f"/api/v1/{path}").status_code for path in ("runs/a", "runs"))

    page = threading.Thread(target=look, daemon=True)
    page.start()
    page.join(SECONDS)
    assert found == [200, 200]
