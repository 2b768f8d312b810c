"""Files next to somebody's data are never executed: not by child processes, and not through git's own config."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gym_fed.core.child_process import module_command
from gym_fed.tracking.environment import _git
from tests.support.sources import ROOT, parsed

PACKAGES = ("gym_fed", "server/gym_server", "client/gym_client", "quant/gym_quant")
ISOLATED = {
    "gym_fed/evaluation/graders/code_tests.py": "-I",
}
"""Modules that name the interpreter themselves, and the option that leaves the working folder out there."""
FINDERS = {
    "gym_fed/core/child_process.py",
    "gym_fed/local_federation.py",  # the folder of installed commands
    "gym_fed/training/processes/ranks.py",  # torchrun takes the interpreter apart from its arguments
    "client/gym_client/service_files.py",  # the same folder
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with modules that leave a mark when they are imported."""
    for name in ("typer", "yaml", "numpy", "torch"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'executed')!r}, 'w').close()\nraise SystemExit(9)\n"
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path / "executed"


def test_a_child_process_imports_nothing_from_the_working_folder(hostile: Path) -> None:
    command = module_command("gym_fed.cli.main", "--version")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, hostile.exists()) == (0, False), done.stderr
    plain = [word for word in command if word != "-P"]
    assert subprocess.run(plain, capture_output=True, check=False).returncode == 9
    assert hostile.exists()  # the folder is hostile indeed


def test_the_commands_keep_the_working_folder_from_processes_that_libraries_start(hostile: Path) -> None:
    script = (
        "import sys, subprocess; from gym_fed.core.child_process import shut_out_working_folder as shut; shut(); "
        "sys.exit(subprocess.run([sys.executable, '-c', 'import typer']).returncode)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, hostile.exists()) == (0, False), done.stderr
    entry = (ROOT / "gym_fed" / "core" / "entry.py").read_text()
    assert entry.index("shut_out_working_folder()") < entry.index("import_module(")


@pytest.mark.parametrize("command", ["gym", "gym-server", "gym-client"])
def test_an_empty_entry_of_pythonpath_brings_no_module_of_the_working_folder(
    hostile: Path, command: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{os.pathsep}/nowhere"}
    run = [Path(sys.executable).with_name(command), "--version"]
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, hostile.exists()) == (0, False), done.stderr


def test_no_module_starts_the_interpreter_by_itself() -> None:
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            place = file.relative_to(ROOT).as_posix()
            tree = parsed(file)
            names = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
            if any(ast.unparse(node) == "sys.executable" for node in names):
                found[place] = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    for place, option in ISOLATED.items():
        assert option in found.pop(place)
    assert set(found) <= FINDERS
    assert [place for place, words in found.items() if "-m" in words] == ["gym_fed/core/child_process.py"]


def test_the_commit_is_read_without_executing_what_the_repositorys_config_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, script = tmp_path / "executed", tmp_path / "monitor"
    script.write_text(f"#!/bin/sh\ntouch {mark}\n")
    script.chmod(0o755)
    folder = tmp_path / "work" / ".git"
    (folder / "refs" / "heads").mkdir(parents=True)
    (folder / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / "refs" / "heads" / "main").write_text(f"{COMMIT}\n")
    (folder / "config").write_text(f"[core]\n\trepositoryformatversion = 0\n\tfsmonitor = {script}\n")
    (folder / "objects").mkdir()
    (folder.parent / "data").mkdir()
    monkeypatch.chdir(folder.parent / "data")
    assert _git() == {"commit": COMMIT}
    assert not mark.exists()


@pytest.mark.parametrize(
    "head",
    ["ref: refs/heads/../../../secret", "ref: /etc/passwd", "x" * 40, "", "ref: refs/heads/none", None],
)
def test_a_head_that_names_no_commit_gives_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str | None
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "secret").write_text(COMMIT)
    if head is None:
        os.mkfifo(tmp_path / ".git" / "HEAD")
    else:
        (tmp_path / ".git" / "HEAD").write_text(head)
    monkeypatch.chdir(tmp_path)
    assert _git() is None


@pytest.mark.parametrize("branch", ["feature/#12", "fix+speed", "größe"])
def test_branches_of_any_name_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, branch: str
) -> None:
    file = tmp_path / ".git" / "refs" / "heads" / branch
    file.parent.mkdir(parents=True)
    file.write_text(COMMIT)
    (tmp_path / ".git" / "HEAD").write_text(f"ref: refs/heads/{branch}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert _git() == {"commit": COMMIT}


def test_commits_of_packed_branches_and_of_work_trees_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tree = tmp_path / "main" / ".git", tmp_path / "tree"
    own = folder / "worktrees" / "tree"
    own.mkdir(parents=True)
    (folder / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / "packed-refs").write_text(
        f"# pack-refs\n{COMMIT} refs/heads/main\n{'f' * 40} refs/heads/tree\n"
    )
    (own / "HEAD").write_text("ref: refs/heads/tree\n")
    (own / "commondir").write_text("../..\n")
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {own}\n")
    monkeypatch.chdir(folder.parent)
    assert _git() == {"commit": COMMIT}
    monkeypatch.chdir(tree)
    assert _git() == {"commit": "f" * 40}
