"""The path in use: described in words, forced by a variable or a block, refused where it is not available."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from gym_quant import CodecError, kernels
from gym_quant.kernels import native

CODE = "from gym_quant import kernels; print(kernels.path(), '|', kernels.describe())"


def ask(code: str, forced: str | None, **words: object) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "GYM_KERNELS"}
    if forced is not None:
        environment["GYM_KERNELS"] = forced
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, **words
    )


def test_the_best_path_is_taken_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYM_KERNELS", raising=False)
    assert kernels.path() == kernels.available()[0]
    assert kernels.available()[-1] == "torch"
    assert "available: " + ", ".join(kernels.available()) in kernels.describe()


@pytest.mark.parametrize("path", kernels.available())
def test_the_variable_forces_a_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_KERNELS", path)
    assert kernels.path() == path
    assert "forced by GYM_KERNELS" in kernels.describe()


def test_a_path_that_does_not_exist_is_an_error_that_names_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GYM_KERNELS", "sse2")
    with pytest.raises(
        CodecError, match=r"GYM_KERNELS: unknown kernel path 'sse2' \(known: avx512, avx2, scalar, torch"
    ):
        kernels.pack_signs(torch.ones(1, 8))


def test_a_path_that_this_processor_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "features", lambda: native.HAS_AVX2)
    with (
        pytest.raises(CodecError, match=r"lacks the instructions .available: avx2, scalar, torch"),
        kernels.using("avx512"),
    ):
        pass


def test_without_the_extension_torch_computes_and_says_why() -> None:
    hidden = "import sys; sys.modules['gym_quant.kernels._native'] = None; "
    done = ask(hidden + CODE, None)
    assert done.stdout.startswith("torch | torch reference (the native extension is missing"), done.stderr
    forced = ask(hidden + CODE, "avx2")
    assert "CodecError" in forced.stderr
    assert "native extension is missing" in forced.stderr


def test_a_block_ends_and_other_threads_do_not_see_it() -> None:
    before, seen = kernels.path(), []
    with kernels.using("torch"):
        assert kernels.path() == "torch"
        other = threading.Thread(target=lambda: seen.append(kernels.path()))
        other.start()
        other.join()
    assert seen == [before]
    assert kernels.path() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.skipif(kernels.available() == ("torch",), reason="no native extension here")
def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    code = """
import os, torch
from gym_quant import kernels
torch.set_num_threads(2)
rows = torch.randint(0, 256, (5, 200_000), dtype=torch.uint8)
here = kernels.hamming(rows)
child = os.fork()
if not child:
    os._exit(0 if torch.equal(kernels.hamming(rows), here) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    done = ask(code, None, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # a process that imports torch
@pytest.mark.skipif(kernels.available() == ("torch",), reason="no native extension here")
def test_callers_in_several_threads_get_their_own_answers() -> None:
    code = """
import threading, torch
from gym_quant import kernels
torch.set_num_threads(3)
rows = [torch.randint(0, 256, (4, 50_000), dtype=torch.uint8) for _ in range(4)]
with kernels.using("torch"):
    expected = [kernels.hamming(one) for one in rows]
wrong = []
def work(k):
    for _ in range(20):
        if not torch.equal(kernels.hamming(rows[k]), expected[k]):
            wrong.append(k)
threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not wrong, wrong
"""
    done = ask(code, None, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here: torch computes")
def test_where_there_is_a_compiler_the_extension_was_built() -> None:
    assert native.absence() == "", "pip install -e . builds it"
