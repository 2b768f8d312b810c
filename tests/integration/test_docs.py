"""Every command that the documentation shows is run, in the order of the page, by a real shell.

A page's ```console blocks are one session in an empty folder. `gym-server run` and `gym api` get a terminal of their
own, as the reader gives them one, and `gym-client join` a terminal at which "y" is typed. The pages for contributors
find a hub that is running already. A block under the comment `<!-- not run: REASON -->` is left out. A ```python block
under the comment `<!-- run -->` is a script that runs after the commands of its page. `<!-- file: NAME -->` is above
one that the reader saves before.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.hub import BIN
from tests.support.wait import SECONDS
from tests.support.warm import shims

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
FIND_A_HUB = ("contribute.md",)
BEGIN_COLD = ("README.md", "doctor.md", "kernels.md")
"""Pages all of whose commands start from nothing, as a hub in its own terminal does on every page; `gym doctor` would
call the warm ones foreign."""
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*$")


def commands(page: Path) -> list[str]:
    """The commands of a page."""
    return commands_in(page.read_text())


def commands_in(text: str) -> list[str]:
    """The lines after `$ ` in the console blocks of a text, continuation lines joined."""
    found: list[str] = []
    end = 0
    for block in re.finditer(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if not NOT_RUN.search(text[end : block.start()]):
            joined = block[1].replace("\\\n", " ")
            found += [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]
        end = block.end()
    return found


def scripts(page: Path) -> list[str]:
    """The page's ```python blocks that are meant to run."""
    return re.findall(r"^<!-- run -->\n```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def files_in(text: str) -> dict[str, str]:
    """The ```python blocks that the reader saves, by the name of the file."""
    return dict(re.findall(r"^<!-- file: (\S+) -->\n```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


SLOW = (
    "data.md",
    "doctor.md",
    "export.md",
    "serving.md",
    "content-filter.md",
    "contribute.md",
    "dashboard.md",
    "evaluation-gate.md",
    "evaluation.md",
    "evaluation-suites.md",
    "coordinate.md",
    "coordinators-day.md",
    "hub-on-the-internet.md",
    "keys.md",
    "privacy-local.md",
    "features.md",
    "graders.md",
    "kernels.md",
    "llamafactory.md",
    "merging.md",
    "model-card-gym-nano.md",
    "planning.md",
    "processes.md",
    "quickstart.md",
    "tuning.md",
    "recipes.md",
    "registry.md",
    "runs.md",
    "safety.md",
    "train.md",
    "variants.md",
    "webui.md",
)
"""Pages that only `make test-all` tries: their commands train, wait, start cold, or are also on a page tried here."""
SERVERS = {
    "gym-server run": "TLS key",  # an error may also say who "listens on" the port
    "gym api serving.yaml": "from openai import",
    "gym api\n": "from openai import",
    "gym webui --port": "/login?token=",
    "gym-server dashboard --": "/login?token=",
}
"""Commands that stay, and what each prints once it answers; with a line's end: the whole command."""
PAGES_WITH_COMMANDS = [page for page in PAGES if page.exists() and commands(page)]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])
        for page in PAGES_WITH_COMMANDS
    ],
)
def test_the_commands_of_a_page_work_as_shown(
    page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "GYM_HOME": str(tmp_path / "home")}
    warm = environment
    if page.name not in BEGIN_COLD:
        commands_here = shims(tmp_path_factory.mktemp("commands"))
        warm = {**environment, "PATH": f"{commands_here}:{environment['PATH']}"}
    play(page, tmp_path, environment, warm)


def play(
    page: Path, folder: Path, environment: dict[str, str], warm: dict[str, str]
) -> list[tuple[str, str]]:
    """Run the commands and scripts of a page in a folder.

    Args:
        page: The page.
        folder: An empty folder.
        environment: Of the servers and scripts.
        warm: Of the other commands.

    Returns:
        Each command, and what it wrote to standard output; without servers and what runs in the background.
    """
    printed: list[tuple[str, str]] = []
    servers: list[subprocess.Popen[bytes]] = []
    try:
        if page.name in FIND_A_HUB:
            (folder / "my.jsonl").write_text(json.dumps({"text": "the reader's own data"}) + "\n")
            servers.append(running_hub(folder, environment))
        for name, text in files_in(page.read_text()).items():
            (folder / name).write_text(text)
        for command in commands(page):
            if f"{command}\n".startswith(tuple(SERVERS)) and not command.endswith("--check"):
                servers.append(in_own_terminal(command, folder, environment))
                continue
            if command.endswith(" &"):
                words = ["bash", "-c", f"exec {command.removesuffix(' &')}"]
                servers.append(subprocess.Popen(words, cwd=folder, env=environment))
                continue
            needs_terminal = command.startswith("gym-client join") and "--yes" not in command
            run = at_a_terminal if needs_terminal else in_a_shell
            status, output, errors = run(command, folder, warm)
            assert status == 0, f"$ {command}\n{output[-3000:]}\n{errors[-3000:]}"
            printed.append((command, output))
        for number, script in enumerate(scripts(page)):
            (folder / f"script{number}.py").write_text(script)
            status, output, errors = in_a_shell(f"python script{number}.py", folder, environment)
            assert status == 0, f"{script}\n{output[-3000:]}\n{errors[-3000:]}"
    finally:
        for server in servers:
            server.kill()
            server.wait()
    return printed


def in_a_shell(command: str, folder: Path, environment: dict[str, str]) -> tuple[int, str, str]:
    """Run in bash, and return the status, standard output and standard error."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=4 * SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


def at_a_terminal(command: str, folder: Path, environment: dict[str, str]) -> tuple[int, str, str]:
    """Run in a pseudo-terminal where somebody answers every question with y."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    shown, answered = bytearray(), 0
    while True:
        try:
            chunk = os.read(master, 4096)
        except OSError:  # Linux: the last writer closed the terminal
            break
        if not chunk:
            break
        shown += chunk
        while shown.count(b"[y/N]") > answered:  # what was typed before a question is no answer to it
            os.write(master, b"y\n")
            answered += 1
    os.close(master)
    return process.wait(SECONDS), shown.decode(errors="replace"), ""


def running_hub(folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A hub of one round on the default port, as another person would run it."""
    init = "gym-server init --dir hub --enrolment open"
    subprocess.run(["bash", "-c", init], cwd=folder, env=environment, check=True, capture_output=True)
    settings = (
        "rounds.num_rounds=1",
        "rounds.min_contributors=1",
        "soup.num_malicious_nodes=0",
        "recipe.max_steps=2",
    )
    return in_own_terminal(
        "gym-server run --dir hub " + " ".join(f"--set {s}" for s in settings), folder, environment
    )


def in_own_terminal(command: str, folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    log = folder / "server.log"
    with open(log, "wb") as file:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=file, stderr=file
        )
    end = time.monotonic() + SECONDS
    ready = next(text for start, text in SERVERS.items() if f"{command}\n".startswith(start))
    while ready not in log.read_text():
        assert server.poll() is None, f"$ {command}\n{log.read_text()}"
        assert time.monotonic() < end, f"$ {command}\n{log.read_text()}"
        time.sleep(0.1)
    return server


def test_pages_show_commands_at_all() -> None:
    assert {"README.md", "coordinate.md"} <= {page.name for page in PAGES_WITH_COMMANDS}
