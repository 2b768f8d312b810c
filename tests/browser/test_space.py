"""`app.py`, the Hugging Face Space: chat, board and evaluation, without colour and without another host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from tests.browser.conftest import REPOSITORY
from tests.support import chromium
from tests.support.ports import free_port
from tests.support.wait import SECONDS, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

PYTHON = os.environ.get("GYM_GRADIO_PYTHON") or sys.executable
"""An environment that has the project and its extras ``web`` and ``eval``."""
needs_gradio = pytest.mark.skipif(
    sys.executable == PYTHON and find_spec("gradio") is None,
    reason="gradio is not installed: the extra web, or GYM_GRADIO_PYTHON",
)


@pytest.fixture
def space(tmp_path: Path, played: Path) -> Iterator[str]:
    """The Space with a federation that has ended, and nothing left to make but what the test does not wait for."""
    folder = tmp_path / "space"
    shutil.copytree(played, folder / "demo" / "hub")
    (folder / "demo" / "result.json").write_text("{}")
    port = free_port()
    settings = {"GYM_SPACE": str(folder), "GRADIO_SERVER_PORT": str(port), "GYM_SPACE_MAKES": "0"}
    with open(tmp_path / "app.log", "wb") as log:
        process = subprocess.Popen(
            [PYTHON, "app.py"], cwd=REPOSITORY, env={**os.environ, **settings}, stdout=log, stderr=log
        )
    try:
        until(
            lambda: b"Running on" in (tmp_path / "app.log").read_bytes() or process.poll() is not None,
            "the Space",
            3 * SECONDS,
        )
        assert process.poll() is None, (tmp_path / "app.log").read_text()[-3000:]
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.kill()
        process.wait()


@needs_gradio
@pytest.mark.slow  # Gradio and the engine as a process of their own, and an evaluation
def test_the_space_answers_shows_the_federation_and_evaluates(space: str, page: Page) -> None:
    page.goto(space)
    page.get_by_role("textbox", name="Message").fill("reverse: hello")
    page.keyboard.press("Enter")
    page.get_by_text("olleh", exact=True).wait_for()
    assert chromium.most_colourful(page.screenshot()) <= chromium.MOST_APART
    page.get_by_role("tab", name="Federation").click()
    page.get_by_text("3 rounds committed").wait_for()
    page.get_by_text("times the median").filter(visible=True).first.wait_for()  # Gradio hides a widest row
    assert chromium.most_colourful(page.screenshot(full_page=True)) <= chromium.MOST_APART
    page.get_by_role("tab", name="Evaluation").click()
    page.get_by_role("button", name="Evaluate").click()
    page.get_by_text("tiny_add").filter(visible=True).first.wait_for()
    assert chromium.most_colourful(page.screenshot()) <= chromium.MOST_APART


def test_requirements_of_the_space_are_the_projects_own_as_they_are_pinned() -> None:
    def pins(name: str) -> dict[str, str]:
        lines = (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
        rows = [Requirement(line) for line in lines if line[:1].isalnum()]
        return {row.name.lower().replace("_", "-"): str(row.specifier) for row in rows}

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = {Requirement(line).name for line in project["dependencies"]}
    wanted, known = pins("requirements-app.txt"), pins("constraints.txt")
    assert set(wanted) == own | {"gradio", "lm-eval", "setuptools"}
    assert {name: known[name] for name in wanted} == wanted


def test_the_card_of_the_space_names_the_application_and_the_pinned_gradio() -> None:
    card = (REPOSITORY / "README-HF.md").read_text(encoding="utf-8").split("---")[1]
    fields = dict(line.split(": ", 1) for line in card.strip().splitlines())
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"gradio=={fields['sdk_version']}" in pins
    assert (REPOSITORY / fields["app_file"]).is_file()
    assert json.loads(fields["python_version"]) in project_pythons()


def project_pythons() -> list[str]:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    return [line.split(" :: ")[-1].rstrip('",') for line in text.splitlines() if "Python :: 3." in line]
