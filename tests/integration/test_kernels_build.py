"""The native kernels are optional: no compiler is no obstacle, and other processors than x86-64 get plain C++."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_compiler_the_build_goes_on_without_the_extension(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "-b", str(tmp_path / "lib"), "-t", str(tmp_path / "temp")],
        cwd=ROOT,
        env=os.environ | {"CC": "no-such-compiler", "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "no-such-compiler" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("_native*"))
    assert "the native kernels were not built" in done.stderr
    assert "gym doctor" in done.stderr


def test_make_install_reports_absent_kernels_and_what_that_slows(tmp_path: Path) -> None:
    kernels = tmp_path / "quant" / "gym_quant" / "kernels"
    for folder in (kernels, tmp_path / "tests" / "unit", tmp_path / ".venv"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "setup.py", ".venv/.installed"):
        (tmp_path / name).touch()  # in this order: the stamp is the newest, so that nothing is installed
    assert "Merging and serving one-bit deltas is slower" in _made(tmp_path)
    (kernels / "_native.cpython-311-x86_64-linux-gnu.so").touch()
    said = _made(tmp_path)
    assert "slower" not in said
    assert "source .venv/bin/activate" in said


@pytest.mark.parametrize(
    ("words", "environment"), [([], ".venv"), (["PYTHON=/opt/bin/python3.13"], ".venvs/python3.13")]
)
def test_a_python_that_is_named_has_an_environment_of_its_own(words: list[str], environment: str) -> None:
    command = ["make", "--dry-run", "test", *words]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f" {environment}/bin/python -m pytest" in said


def _made(folder: Path) -> str:
    done = subprocess.run(
        ["make", "--no-print-directory", "install"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # compiles all sources, half a minute
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
def test_the_sources_build_and_compute_without_any_instruction_set(tmp_path: Path) -> None:
    library = tmp_path / "plain.so"
    include = sysconfig.get_path("include")
    sources = sorted(str(file) for file in (ROOT / "quant" / "csrc").glob("*.cpp"))
    options = ["-std=c++17", "-O1", "-DGQ_PLAIN", "-shared", "-fPIC", "-pthread", f"-I{include}"]
    done = subprocess.run(["c++", *options, *sources, "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plain = ctypes.CDLL(str(library))
    assert plain.gq_features() == 0
    x = np.array([[1, -1, 0, -0.0, -2, -3, 4, 5, 6]], dtype=np.float32)
    bits = np.zeros((1, 2), dtype=np.uint8)
    pointers = (ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(1), ctypes.c_int64(9))
    assert plain.gq_pack(0, 1, *pointers, ctypes.c_void_p(bits.ctypes.data)) == 0
    assert bits.tolist() == [[0b11001101, 1]]
