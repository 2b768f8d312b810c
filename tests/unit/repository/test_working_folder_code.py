"""Files next to somebody's data are never executed: not by child processes, and not through git's own config."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gym_fed.core.child_process import module_command, run_process
from gym_fed.serving.vllm.connection import vllm_environment
from gym_fed.tracking.environment import _git
from tests.support.sources import ROOT, parsed

PACKAGES = ("gym_fed", "server/gym_server", "client/gym_client", "quant/gym_quant")
ISOLATED = {
    "gym_fed/evaluation/graders/code_tests.py": "-I",
}
"""Modules that name the interpreter themselves, and the option that leaves the working folder out there."""
STARTERS = {
    "gym_fed/core/child_process.py": "the launcher",
    "gym_fed/evaluation/graders/_sandbox_child.py": "inside the sandbox: forks, and becomes the graded program",
}
"""Modules that start or replace a process."""
_OF_OS = re.compile(r"exec[lv]p?e?|fork(pty)?|popen|posix_spawnp?|spawn[lv]p?e?|startfile|system")
_STARTING = re.compile(
    r"subprocess\.(Popen|run|call|check_call|check_output|getoutput|getstatusoutput)"
    rf"|os\.({_OF_OS.pattern})|pty\.(fork|spawn)|asyncio\.create_subprocess_(exec|shell)"
)
_MODULES = re.compile(r"\b(asyncio|multiprocessing|os|pty|subprocess|ProcessPoolExecutor)\b")
"""What ``starts`` may find is of one of these; the other modules need not be parsed."""
_SUBPROCESS_TYPES = {"DEVNULL", "PIPE", "STDOUT", "CompletedProcess", "TimeoutExpired", "list2cmdline"}
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
            if "executable" not in file.read_text(encoding="utf-8"):
                continue
            place = file.relative_to(ROOT).as_posix()
            tree = parsed(file)
            names = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "executable"]
            if any(ast.unparse(node) == "sys.executable" for node in names):
                found[place] = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    for place, option in ISOLATED.items():
        assert option in found.pop(place)
    assert set(found) <= FINDERS
    assert [place for place, words in found.items() if "-m" in words] == ["gym_fed/core/child_process.py"]


def starts(tree: ast.Module) -> list[str]:
    """Return what a module uses that starts a process."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = f"{getattr(node.func.value, 'id', '')}.{node.func.attr}"
            found += [called] if _STARTING.fullmatch(called) else []
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in ("multiprocessing", "pty")]
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if node.module == "subprocess":
                found += sorted(names - _SUBPROCESS_TYPES)
            elif node.module == "os":
                found += sorted(name for name in names if _OF_OS.fullmatch(name))
            elif (node.module or "").split(".")[0] == "multiprocessing" or "ProcessPoolExecutor" in names:
                found.append(str(node.module))
    return found


def test_every_child_process_is_started_by_the_launcher() -> None:
    modules = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    able = [file for file in modules if _MODULES.search(file.read_text(encoding="utf-8"))]
    found = {file.relative_to(ROOT).as_posix() for file in able if starts(parsed(file))}
    assert found == set(STARTERS)


@pytest.mark.parametrize(
    "text",
    [
        "subprocess.run(['git'])",
        "from subprocess import Popen",
        "os.system('ls')",
        "from os import execve",
        "import multiprocessing.pool",
        "from concurrent.futures import ProcessPoolExecutor",
        "await asyncio.create_subprocess_exec('ls')",
    ],
)
def test_the_rule_for_child_processes_sees_every_way_to_start_one(text: str) -> None:
    assert starts(ast.parse(text))


def test_a_child_process_has_no_passphrase_no_hook_and_no_search_path_into_the_working_folder(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYM_SERVER_PASSPHRASE", "secret")
    monkeypatch.setenv("GYM_PASSPHRASE_NEW", "secret")
    monkeypatch.setenv("PYTHONSTARTUP", "typer.py")
    for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH"):
        monkeypatch.setenv(name, f":{os.environ.get(name, '')}:")
    command = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ))); import typer"]
    done = run_process(command, text=True)
    assert (done.returncode, done.stderr, hostile.exists()) == (0, "", False)
    found = json.loads(done.stdout)
    assert not found.keys() & {"GYM_SERVER_PASSPHRASE", "GYM_PASSPHRASE_NEW", "PYTHONSTARTUP"}
    assert all("" not in found[name].split(":") for name in ("PATH", "LD_LIBRARY_PATH") if found[name])
    kept = run_process(["env"], passphrases=True, text=True)
    assert "GYM_SERVER_PASSPHRASE=secret" in kept.stdout.splitlines()


def test_a_child_process_inherits_no_descriptor(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        listed = run_process(
            [sys.executable, "-c", "import os; print(os.listdir('/proc/self/fd'))"], text=True
        )
        assert repr(str(file.fileno())) not in listed.stdout


def test_vllm_and_its_processes_import_nothing_from_the_working_folder(hostile: Path) -> None:
    child = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-m', 'typer', '--help']).returncode)"
    environment = vllm_environment(hostile.parent / "imports", "key", 1, {})
    done = run_process([sys.executable, "-P", "-c", child], env=environment, text=True)
    assert (done.returncode, hostile.exists()) == (0, False), done.stderr


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
