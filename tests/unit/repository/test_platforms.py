"""What Windows lacks: imported by no module when it is loaded, named in few places, replaced where work needs it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.like_windows import FUNCTIONS, LIKE_WINDOWS, MODULES, SIGNALS
from tests.support.sources import parsed

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("gym_fed", "server/gym_server", "client/gym_client", "quant/gym_quant")
SYSTEMS = {"here": {}, "like windows": LIKE_WINDOWS}
NAMED_IN = {
    "gym_fed/evaluation/graders/math_verify.py",  # looks first
    "gym_fed/core/child_process.py",  # without priorities nothing is lost
    "gym_fed/doctor/checks/devices.py",  # looks first
    "gym_fed/evaluation/graders/code_tests.py",  # refuses Windows
    "gym_fed/evaluation/graders/_sandbox_child.py",
    "gym_fed/core/file_lock.py",
    "gym_fed/core/portable.py",
    "gym_fed/serving/vllm/process.py",  # vLLM does not run on Windows
    "gym_fed/serving/vllm_plugin/launch.py",
    "gym_fed/web/jobs.py",  # looks first
}
"""Files that may name a function, a flag or a signal that Windows lacks."""


def modules() -> list[Path]:
    return [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


def run_when_loaded(node: ast.AST) -> Iterator[ast.AST]:
    """All below a module that its import executes: functions are not."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from run_when_loaded(child)


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return (
        {(node.module or "").split(".")[0]} if isinstance(node, ast.ImportFrom) and not node.level else set()
    )


def test_no_module_imports_what_windows_lacks_when_it_is_loaded() -> None:
    found = []
    for file in modules():
        tree = parsed(file)
        wrong = {name for node in run_when_loaded(tree) for name in imported(node)} & set(MODULES)
        found += [f"{file.relative_to(ROOT)} imports {name}" for name in sorted(wrong)]
    assert found == [], "import it in the function that needs it, and note what happens without"


def test_functions_flags_and_signals_that_windows_lacks_are_named_in_few_places() -> None:
    lacking = {"os": set(FUNCTIONS), "signal": set(SIGNALS)}
    found = set()
    for file in modules():
        for node in ast.walk(parsed(file)):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            if node.attr in lacking.get(node.value.id, ()):
                found.add(file.relative_to(ROOT).as_posix())
    assert found == NAMED_IN, "gym_fed/core/portable.py has what takes their place"


LOCKS = """
    import os, sys, threading, time
    from pathlib import Path
    from gym_fed.core.file_lock import LockHeldError, is_still_there, lock, lockable_folder, unlock
    from gym_fed.core.files import atomic_file, whole_or_not_at_all
    from gym_fed.core.portable import read_at

    def is_free(file, **words):
        try:
            lock(file, **words)
        except LockHeldError:
            return False
        unlock(file)
        return True

    folder = Path(sys.argv[1])
    mine, other = (folder / "state").open("a+b", buffering=0), (folder / "state").open("a+b", buffering=0)
    mine.write(b"12345")
    lock(mine)
    assert not is_free(other) and not is_free(other, shared=True)
    place = os.lseek(mine.fileno(), 0, os.SEEK_CUR)
    assert place == 5, f"the place in the file stays, and is {place}"
    assert (folder / "state").read_bytes() == b"12345", "others read what is locked"
    assert read_at(other.fileno(), 3, 1) == b"234"
    unlock(mine)
    assert is_free(other)
    lock(mine)
    threading.Timer(0.2, mine.close).start()
    began = time.monotonic()
    lock(other, wait=True)
    assert time.monotonic() - began > 0.1, "it waits until the file is closed"
    other.close()

    room = folder / "room"
    room.mkdir()
    with lockable_folder(room) as first:
        lock(first)
        assert is_still_there(first, room)
        with lockable_folder(room) as second:
            assert not is_free(second)
        room.rename(folder / "taken")
        assert not is_still_there(first, room)
    try:
        with lockable_folder(room):
            raise AssertionError("there is no such folder")
    except OSError:
        pass
    with atomic_file(folder / "whole") as file:
        file.write(b"a\\nb")
    assert (folder / "whole").read_bytes() == b"a\\nb"
    with whole_or_not_at_all(folder / "made") as part:
        (part / "x").write_text("x")
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["made", "state", "taken", "whole"], left
"""
HELD = """
    import sys, time
    from gym_fed.core.file_lock import lock
    file = open(sys.argv[1] + "/state", "a")
    lock(file)
    print("held", flush=True)
    time.sleep(60)
"""


def environment(system: str) -> dict[str, str]:
    return {**os.environ, **SYSTEMS[system]}


@pytest.mark.parametrize("system", SYSTEMS)
def test_files_and_folders_are_locked_and_written_whole(system: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", textwrap.dedent(LOCKS), str(tmp_path)]
    done = subprocess.run(words, env=environment(system), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_lock_ends_with_a_killed_process(system: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", textwrap.dedent(HELD), str(tmp_path)]
    probe = textwrap.dedent(HELD).replace("time.sleep(60)", "")
    again = [sys.executable, "-c", probe, str(tmp_path)]
    holder = subprocess.Popen(words, env=environment(system), stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        done = subprocess.run(again, env=environment(system), capture_output=True, text=True)
        assert "LockHeldError" in done.stderr
    finally:
        holder.kill()
        holder.wait()
    done = subprocess.run(again, env=environment(system), capture_output=True, text=True)
    assert done.stdout == "held\n", done.stderr


def test_the_sandbox_of_graders_refuses_windows_with_a_remedy() -> None:
    code = """
        from gym_fed.core.errors import GymError
        from gym_fed.evaluation.graders.code_tests import Sandbox
        try:
            Sandbox().check()
        except GymError as error:
            print(error.code.name, error.message, error.hint)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, env=environment("like windows"), capture_output=True, text=True)
    assert "CONFIG_INVALID" in done.stdout, done.stderr
    assert "Windows" in done.stdout
    assert "WSL" in done.stdout
