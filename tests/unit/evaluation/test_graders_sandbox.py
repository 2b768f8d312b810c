"""Code that a model wrote, in the sandbox: what passes, what is cut short, and what it cannot reach."""

from __future__ import annotations

import ctypes
import os
import socket
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import GymError
from gym_fed.evaluation.graders import code_tests as sandbox_module
from gym_fed.evaluation.graders.base import Sample
from gym_fed.evaluation.graders.code_tests import CodeTests, CodeTestsConfig, Sandbox, code_in


@cache
def namespaces_are_permitted() -> bool:
    try:
        Sandbox().check()
    except GymError:
        return False
    return True


NAMESPACES = pytest.param(
    "namespaces",
    marks=pytest.mark.skipif(
        not namespaces_are_permitted(), reason="this machine forbids unprivileged user namespaces"
    ),
)
both = pytest.mark.parametrize("isolation", [NAMESPACES, "process"])
isolated = pytest.mark.parametrize("isolation", [NAMESPACES])


def passes(isolation: str, code: str, tests: str = "pass", **limits: Any) -> bool:
    return Sandbox(isolation=isolation, **{"timeout_seconds": 10.0, **limits}).passes(code, tests)  # type: ignore[arg-type]


@both
def test_right_code_passes_and_wrong_code_does_not(isolation: str) -> None:
    tests = "assert double(4) == 8\nassert double(0) == 0"
    assert passes(isolation, "def double(x):\n    return 2 * x", tests)
    assert not passes(isolation, "def double(x):\n    return x + 2", tests)
    assert not passes(isolation, "def double(x:", tests)
    assert not passes(isolation, "", tests)


@both
def test_an_endless_loop_ends_with_the_time(isolation: str) -> None:
    assert not passes(isolation, "while True:\n    pass", timeout_seconds=0.4)
    assert not passes(isolation, "import time\ntime.sleep(600)", timeout_seconds=0.4)


@both
def test_leaving_before_the_tests_is_no_pass(isolation: str) -> None:
    assert not passes(isolation, "import sys\nsys.exit(0)", "assert False")
    assert not passes(isolation, "import os\nos._exit(0)", "assert False")
    assert not passes(isolation, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "assert False")


@both
def test_an_answer_cannot_swallow_the_tests_by_an_open_quote(isolation: str) -> None:
    assert not passes(isolation, 'x = """', '"""\nassert False')


NOISE = """
import os
for descriptor in range(3, 64):
    try:
        os.write(descriptor, b"failed:x" * 99)
    except OSError:
        pass
os._exit(0)
"""


@both
def test_writing_to_every_open_file_does_not_pass_or_stop_the_run(isolation: str) -> None:
    assert not passes(isolation, NOISE)


@both
def test_memory_and_file_size_are_limited(isolation: str) -> None:
    assert not passes(isolation, "x = bytearray(4 * 2**30)")
    assert not passes(
        isolation, "with open('big', 'wb') as f:\n    f.write(bytes(2 * 2**20))", max_file_bytes=2**20
    )
    assert passes(
        isolation, "with open('small', 'wb') as f:\n    f.write(bytes(2**18))", max_file_bytes=2**20
    )


@both
def test_printing_a_lot_does_no_harm_and_nothing_can_be_read(isolation: str) -> None:
    assert passes(isolation, "import sys\nfor _ in range(20_000):\n    print('x' * 1000)")
    assert passes(isolation, "import sys", "assert sys.stdin.read() == ''")


@both
def test_the_environment_is_empty(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    tests = "assert set(os.environ) <= {'HOME', 'TMPDIR', 'LANG', 'LC_CTYPE', 'PATH'}"
    assert passes(isolation, "import os", tests)


@both
def test_it_works_in_an_empty_folder_that_is_gone_afterwards(isolation: str, tmp_path: Path) -> None:
    before = set(Path(sandbox_module.tempfile.gettempdir()).glob("gym-sandbox-*"))
    assert passes(
        isolation,
        "import os",
        "assert os.listdir('.') == []\nopen('a', 'w').write('x')\nassert os.listdir('.')",
    )
    assert set(Path(sandbox_module.tempfile.gettempdir()).glob("gym-sandbox-*")) <= before


FORKS = """
import os, time
children = 0
try:
    while children < 100:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
except OSError:
    pass
"""


FORKS_FOR_EVER = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""

DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    os.execv("/bin/sh", ["/bin/sh", "-c", {command!r}])
time.sleep(0.3)
"""


@isolated
def test_processes_are_limited_and_none_survives(isolation: str) -> None:
    assert passes(isolation, FORKS, "assert 0 < children < 16", max_processes=16)
    assert not passes(isolation, FORKS_FOR_EVER, timeout_seconds=1)
    marker = f"sleep 60; echo {os.getpid()}"
    assert passes(isolation, DAEMON.format(command=marker))
    running = [line_of(process) for process in Path("/proc").glob("[0-9]*")]
    assert running
    assert not any(marker in line for line in running)


def line_of(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return ""


@isolated
def test_there_is_no_network_not_even_this_machine(isolation: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reach = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)"
        assert not passes(isolation, reach)
        assert passes("process", reach)  # and this is what `process` does not promise


WRITES = """
for folder in (os.path.dirname(os.__file__), "/usr", "/"):
    try:
        open(folder + "/planted", "w")
    except OSError:
        continue
    assert False
"""


@isolated
def test_there_are_no_files_but_pythons_own_and_they_cannot_be_written(
    isolation: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    tests = f"assert not os.path.exists({str(secret)!r}) and not os.path.exists('/etc/passwd')"
    assert passes(isolation, "import os", tests)
    assert passes(isolation, "import os", WRITES)


@isolated
def test_it_is_nobody_without_rights(isolation: str) -> None:
    code = "import ctypes, os\nlibc = ctypes.CDLL(None)"
    tests = (
        "assert os.getuid() != 0\n"
        "assert libc.unshare(0x10000000) != 0, 'a new user namespace'\n"
        "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) != 0, 'a mount'\n"
        "assert libc.chroot(b'/tmp') != 0, 'chroot'"
    )
    assert passes(isolation, code, tests)


def test_a_machine_that_forbids_namespaces_is_refused_at_setup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = Path(sandbox_module.__file__).with_name("_sandbox_child.py").read_text()
    forbidding = child.replace("NEW_NAMESPACES = 0x10000000", "NEW_NAMESPACES = 0x1 | 0x10000000")
    assert forbidding != child
    (tmp_path / "_sandbox_child.py").write_text(forbidding)
    monkeypatch.setattr(sandbox_module, "__file__", str(tmp_path / "_sandbox.py"))
    grader = CodeTests(CodeTestsConfig(grader="code_tests"))
    with pytest.raises(GymError, match=r"isolation namespaces cannot be set up on this machine: .*unshare"):
        grader.setup()


HUMAN_EVAL = {
    "entry_point": "add",
    "tests": "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n",
}
PROMPT = 'def add(x: int, y: int) -> int:\n    """Add two numbers."""\n'


def graded(completions: list[str], rows: list[dict[str, Any]], prompt: str = "q", **keys: Any) -> list[float]:
    isolation = "namespaces" if namespaces_are_permitted() else "process"
    grader = CodeTests(CodeTestsConfig(grader="code_tests", isolation=isolation, **keys))
    grader.setup()
    return grader.grade([Sample(prompt, c, r) for c, r in zip(completions, rows, strict=True)])


def test_a_row_of_human_eval_is_graded_by_its_check() -> None:
    answers = ["    return x + y\n", "    return x - y\n", "    import sys; sys.exit(0)\n"]
    assert graded(answers, [HUMAN_EVAL] * 3, PROMPT, continues_prompt=True) == [1.0, 0.0, 0.0]


def test_code_is_taken_out_of_its_fence_and_a_list_of_tests_can_count_in_parts() -> None:
    answer = "Sure:\n```python\ndef f(x):\n    return abs(x)\n```\nThat is it."
    row = {"tests": ["assert f(1) == 1", "assert f(-1) == 1", "assert f(2) == 3", "assert f('') == 0"]}
    assert graded([answer], [row]) == [0.0]
    assert graded([answer], [row], partial=True) == [0.5]
    assert code_in("a\n```\nx = 1\n```\nb\n```py\nx = 2\n```") == "x = 2\n"
    assert code_in("x = 3") == "x = 3"


def test_rows_without_tests_are_refused() -> None:
    with pytest.raises(GymError, match="'tests' of a row is empty"):
        graded(["x = 1"], [{"tests": []}])


@both
def test_keys_of_the_kernels_session_keyring_are_not_inherited(isolation: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    add_key, request_key = 248, 249  # of x86_64
    if os.uname().machine != "x86_64" or libc.syscall(add_key, b"user", b"gym-test", b"secret", 6, -3) < 0:
        pytest.skip("this machine has no kernel keyrings that can be written")
    assert libc.syscall(request_key, b"user", b"gym-test", None, 0) > 0
    found = (
        f"import ctypes\nfound = ctypes.CDLL(None).syscall({request_key}, b'user', b'gym-test', None, 0) > 0"
    )
    assert passes(isolation, found, "assert not found")
    assert not passes(isolation, found, "assert found")
