"""`gym export`: its words, what it refuses before a model is loaded, what it prints, and how it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gym_fed.base.models import nano_path
from gym_fed.cli.export import _summary
from gym_fed.cli.main import app
from gym_fed.core import aliases as other_words
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import full_disk_named
from gym_fed.core.registries import EXPORT_FORMATS
from gym_fed.export.choice import format_by_suffix, resolve_format
from gym_fed.export.formats import base as formats_base
from gym_fed.export.formats.base import Options, require_room
from gym_fed.export.needs import Weights
from tests.support.wait import SECONDS

pytestmark = pytest.mark.usefixtures("warm_children")


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_words, "_said", set())


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model can be loaded: what is refused is refused before."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("gym_fed.export.source.open_source", fail)


def refusal(*words: str) -> GymError:
    result = CliRunner().invoke(app, ["export", *words])
    assert isinstance(result.exception, GymError), result.output
    return result.exception


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("hf", "huggingface"), ("safetensors", "huggingface"), ("peft", "adapter"), ("LoRA", "adapter"),
        ("GGUF", "gguf"), ("torch-export", "torch_export"), ("trtllm", "tensorrt_llm"), ("core_ml", "coreml"),
    ],
)  # fmt: skip
def test_a_format_by_its_name_elsewhere_is_ours(
    name: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EXPORT_FORMATS.type_of(wanted), "requires", ())
    assert resolve_format(name, None, Options())[0].name == wanted


@pytest.mark.parametrize(
    ("form", "name", "wanted"),
    [
        ("gguf", "Q4_K_M", "q4_k_m"), ("gguf", "int8", "q8_0"), ("gguf", "int4", "q4_k_m"), ("gguf", "fp16", "f16"),
        ("delta", "bitdelta", ""), ("gguf", "", ""),
    ],
)  # fmt: skip
def test_a_quantization_by_its_name_elsewhere_is_the_formats(
    form: str, name: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EXPORT_FORMATS.type_of(form), "requires", ())
    assert resolve_format(form, None, Options(quantization=name))[1].quantization == wanted


def test_a_suffix_names_its_format_and_any_other_name_is_a_model_folder() -> None:
    assert format_by_suffix(Path("a.GGUF")) == "gguf"
    assert format_by_suffix(Path("a.gymdelta")) == "delta"
    assert format_by_suffix(Path("qwen-v1.5")) == "huggingface"


@pytest.mark.usefixtures("unloadable")
def test_what_cannot_be_written_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for words, says in (
        (
            ("gym-nano", "-o", f"{out}.gguf", "--format", "hf"),
            "ends in .gguf, but format huggingface is a folder",
        ),
        (
            ("gym-nano", "-o", f"{out}.safetensors"),
            "ends in .safetensors, but format huggingface is a folder",
        ),
        (("gym-nano", "-o", f"{out}.onnx", "--format", "gguf"), "ends in .onnx, but format gguf is a file"),
        (("gym-nano", "-o", out, "--format", "zip"), "format zip is unknown"),
        (("gym-nano", "-o", out, "--quantization", "q8_0"), "format huggingface has no quantization q8_0"),
        (("gym-nano",), "--output is missing"),
        ((), "MODEL is missing"),
        (("gym-nano", "-o", str(tmp_path)), "exists"),
    ):
        assert says in str(refusal(*words)), words
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("unloadable")
def test_a_refusal_names_the_format_or_the_option_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EXPORT_FORMATS.type_of("gguf"), "requires", ())
    out = str(tmp_path / "out")
    merging = tmp_path / "merge.yaml"
    merging.write_text(f"model_name_or_path: gym-nano\ntemplate: default\nexport_dir: {out}\n")
    for words, says, remedy in (
        (("-o", f"{out}.xml"), "files are written into a folder", f"-o {out} --format openvino"),
        (
            ("-o", f"{out}.mlpackage"),
            "files are written into a folder",
            f"-o {out} --format coreml",
        ),
        (("-o", f"{out}.tflite"), "format huggingface is a folder", f"-o {out}"),
        (
            ("-o", out, "--quantization", "q8_0"),
            "no quantization q8_0",
            "--format gguf --quantization q8_0",
        ),
        (
            ("-o", f"{out}.gguf", "--dtype", "float16"),
            "format gguf has no --dtype",
            "--quantization sets how",
        ),
        (("-o", f"{out}.gymdelta", "--dtype", "float16"), "format delta has no --dtype", "leave it out"),
        (("-o", str(merging / "out")), "merge.yaml is a file, not a folder", "choose another folder"),
    ):
        error = refusal("gym-nano", *words)
        assert says in error.message, words
        assert remedy in str(error.hint), words
    for words in (("--format", "gguf"), ("--quantization", "w4"), ("--data", "rows.jsonl"), ("--rank", "8")):
        assert f"{words[0]} cannot be combined with a file" in refusal(str(merging), *words).message
    assert list(tmp_path.iterdir()) == [merging]


@pytest.mark.parametrize(
    ("form", "quantization", "finer"),
    [
        ("gguf", "q4_0", "q4_k_m or q5_k_m or q6_k or q8_0;"), ("gguf", "q8_0", "--quantization f32;"),
        ("gguf", "f32", "report this"), ("onnx", "int8", "omit --quantization"), ("onnx", "", "report this"),
        ("awq", "w4g64_rtn", "--quantization w4g64 or --format gptq --quantization w8;"),
        ("gptq", "w8", "--format gguf --quantization q8_0;"),
    ],
)  # fmt: skip
def test_what_is_rounded_too_far_is_refused_with_what_rounds_less(
    form: str, quantization: str, finer: str
) -> None:
    assert finer in EXPORT_FORMATS.new(form).remedy_of(Options(quantization=quantization))


def test_the_line_about_a_rounded_export_says_what_rounding_changed() -> None:
    figures = {"max": 1.1, "largest": 19.0, "top1": 0.984}
    check = {"read_by": "onnxruntime 1", "read_back": figures, "against_the_source": {**figures, "max": 0.0}}
    record = {"bytes": 1000, "seconds": {"all": 3}, "check": check, "unchecked": False}
    assert _summary(record) == (
        "1.0 kB in 3 s, read back by onnxruntime 1, logits differ by at most 1.1 (largest: 19), "
        "same top token at 98.4% of positions; against the source the same logits"
    )


def test_help_says_what_a_model_is() -> None:
    result = CliRunner().invoke(app, ["export", "--help"])
    assert "output_dir of a run" in " ".join(result.stdout.replace("│", " ").split())


def test_the_list_of_formats_shows_the_suffix_that_names_each() -> None:
    shown = CliRunner().invoke(app, ["export", "--list"]).stdout
    for name in ("model.gguf", "model.onnx", "model.pt2", "model.pte", "model.gymdelta"):
        assert f"-o {name.replace('model', 'NAME')}" in shown


@pytest.mark.usefixtures("unloadable")
def test_too_little_disk_or_memory_is_refused_with_the_numbers_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "out")
    monkeypatch.setattr("gym_fed.doctor.checks.devices.available_memory_bytes", lambda: 3_000_000)
    error = refusal("gym-nano", "-o", out)
    assert error.code is ErrorCode.TOO_LARGE
    assert (
        "GB of memory, but 3.0 MB are free" in error.message
        or "MB of memory, but 3.0 MB are free" in error.message
    )
    monkeypatch.setattr(
        formats_base.shutil, "disk_usage", lambda _: formats_base.shutil._ntuple_diskusage(0, 0, 5000)
    )
    error = refusal("gym-nano", "-o", out)
    assert error.code is ErrorCode.DISK_FULL
    assert f"{tmp_path} has 5.0 kB" in error.message
    assert list(tmp_path.iterdir()) == []


def test_memory_that_only_the_check_lacks_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, chosen = Weights(1_000_000_000), EXPORT_FORMATS.new("huggingface")
    needs = chosen.needs(weights, Options(dtype="bfloat16"))
    assert needs.disk == 2_000_000_000
    monkeypatch.setattr("gym_fed.doctor.checks.devices.available_memory_bytes", lambda: needs.writing)
    assert require_room(chosen, weights, tmp_path / "out", Options(dtype="bfloat16"), check=False) == needs
    with pytest.raises(GymError) as caught:
        require_room(chosen, weights, tmp_path / "out", Options(dtype="bfloat16"), check=True)
    assert caught.value.hint is not None
    assert "--skip-check" in caught.value.hint


def test_help_and_list_need_no_torch_and_the_list_names_every_format_of_the_registry() -> None:
    code = (
        "import sys\nsys.argv = ['gym', 'export', sys.argv[1]]\nfrom gym_fed.cli.main import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    shown = {
        word: subprocess.run(
            [sys.executable, "-c", code, word],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "400"},
        ).stdout
        for word in ("--help", "--list")
    }
    assert "--list" in shown["--help"]
    for name in EXPORT_FORMATS.names():
        line = next(line for line in shown["--list"].splitlines() if line.split()[:1] == [name])
        assert len(line.split()) > 4
        for quantization in EXPORT_FORMATS.type_of(name).quantizations:
            assert quantization in line


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
    except OSError:
        return False


@pytest.mark.slow  # 10 s for each signal and stage: real processes
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are read from /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("stage", ["loading", "writing", "answering ..."])
def test_a_stopped_export_leaves_no_file_no_process_and_nothing_that_the_next_one_does_not_remove(
    tmp_path: Path, number: signal.Signals, stage: str
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "gym_fed.cli.main",
        "export",
        str(nano_path()),
        "-o",
        str(tmp_path / "out"),
    ]
    exporting = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert exporting.stderr is not None
    for line in exporting.stderr:
        if line.startswith(stage):
            break
    children = children_of(exporting.pid)
    assert children, "the process that reads the export back is started before the model is loaded"
    exporting.send_signal(number)
    status = exporting.wait(SECONDS)
    exporting.stderr.close()
    assert status == (-number if number is signal.SIGKILL else ErrorCode.INTERRUPTED.exit_code)
    deadline = time.monotonic() + SECONDS
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, children))
    assert not (tmp_path / "out").exists()
    # torch makes a folder for its compiler, of its own name, and keeps it for later
    assert [entry.name for entry in scratch.iterdir() if not entry.name.startswith("torchinductor_")] == []
    left = [entry for entry in tmp_path.iterdir() if entry != scratch]
    assert all(entry.name.startswith(".out.") and number is signal.SIGKILL for entry in left)
    subprocess.run([*command, "--skip-check"], check=True, capture_output=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "tmp"]


def test_a_child_in_a_long_call_of_c_ends_with_its_parent(tmp_path: Path) -> None:
    module = tmp_path / "sleeper.py"
    module.write_text(
        "import ctypes, os\nfrom gym_fed.export.process import child_job\n"
        "with child_job() as (job, say):\n    say(str(os.getpid()))\n"
        "    ctypes.PyDLL(None).sleep(60)  # holds the interpreter's lock, as a converter may\n"
    )
    code = (
        "import os, signal\nfrom gym_fed.export.process import ModuleProcess\n"
        "def report(stage, done, total):\n    print(stage, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "ModuleProcess('sleeper').run({}, report)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == -signal.SIGKILL, found.stderr
    child = int(found.stdout)
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_the_end_of_a_child_for_want_of_disk_or_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_fed.export.process import ModuleProcess

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, ending, code in (
        ("full", "raise OSError(28, 'No space left on device')", ErrorCode.DISK_FULL),
        ("rust", "raise ValueError('I/O error: no space (os error 28)')", ErrorCode.DISK_FULL),
        ("killed", "import os; os.kill(os.getpid(), 9)", ErrorCode.BUSY),
        ("large", "raise MemoryError", ErrorCode.BUSY),
    ):
        (tmp_path / f"{name}.py").write_text(ending)
        with pytest.raises(GymError) as caught, full_disk_named(tmp_path / "model.gguf"):
            ModuleProcess(name).run({})
        assert caught.value.code is code, name
        assert (str(tmp_path / "model.gguf") in caught.value.message) == (code is ErrorCode.DISK_FULL)


def test_a_disk_that_fills_up_meanwhile_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_fed.export.formats.huggingface import HuggingFace

    def fill(self: object, source: object, target: Path, options: object) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(HuggingFace, "write", fill)
    error = refusal("gym-nano", "-o", str(tmp_path / "out"))
    assert error.code is ErrorCode.DISK_FULL
    assert str(tmp_path / "out") in error.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["tensorrt_llm"])
def test_a_recipe_folder_says_what_to_run_where_and_that_it_was_not_run(tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["export", "gym-nano", "-o", str(out), "--format", form, "--skip-check"])
    assert result.exit_code == 0, result.output
    record = json.loads((out / "export.json").read_text())
    assert "was not run" in record["unchecked"]
    assert "the check was skipped" in record["unchecked"]
    assert "trtllm-serve /model" in (out / "RECIPE.md").read_text()
    subprocess.run(["sh", "-n", str(out / "serve.sh")], check=True)
    assert {"serve.sh", "RECIPE.md", "model.safetensors"} <= record["files"].keys()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the closed pipe ends it after its imports")
def test_a_child_whose_parent_ended_before_it_began_imports_nothing(tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    (tmp_path / "slow_library.py").write_text(f"import pathlib; pathlib.Path({str(imported)!r}).touch()\n")
    code = "from gym_fed.export.process import child_job\nwith child_job():\n    pass\n"
    reader, writer = os.pipe()
    os.write(writer, b'["slow_library"]\n')
    os.close(writer)
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=reader,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    os.close(reader)
    assert done.returncode == 1
    assert not imported.exists()
