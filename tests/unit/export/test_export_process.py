"""Child processes of an export: started before their jobs, one per job, and gone with the export."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.registries import EXPORT_FORMATS
from gym_fed.export.formats.base import Options
from gym_fed.export.process import ModuleProcess, Processes

_WORKER = """
import sys
from gym_fed.export.process import child_job, leave

if __name__ == "__main__":
    with child_job() as (job, say):
        say(f"{'wave' in sys.modules} {'no_such_module' in sys.modules} {job['number']}")
    leave(job["number"])
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_worker.py").write_text(_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "a_worker"


def test_a_process_has_imported_its_libraries_when_it_gets_its_job(worker: str) -> None:
    said: list[str] = []
    child = ModuleProcess(worker, ["wave", "no_such_module"])  # one that is missing is the job's to report
    status, _ = child.run({"number": 3}, lambda stage, done, total: said.append(stage))
    assert (said, status) == (["True False 3"], 3)


def test_a_job_goes_to_the_process_that_waits_for_it_and_the_next_one_to_a_new_process(worker: str) -> None:
    said: list[str] = []
    with Processes() as processes:
        processes.start(worker, ["wave"])
        for number in (0, 1):
            processes.run(worker, {"number": number}, lambda stage, done, total: said.append(stage))
    assert said == ["True False 0", "False False 1"]


def test_processes_that_get_no_job_end_with_the_block(worker: str) -> None:
    with Processes() as processes:
        processes.start(worker)
        child = processes._started[worker]._child
        assert child.poll() is None
    assert child.returncode is not None


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "modules"),
    [
        pytest.param("huggingface", ["gym_fed.export.readers.reading"], marks=pytest.mark.slow),
        ("gguf", ["gym_fed.export.gguf.convert", "gym_fed.export.readers.reading"]),
    ],
)
def test_an_export_starts_its_processes_before_the_model_is_loaded_and_none_later(
    name: str, modules: list[str], shared_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from gym_fed.cli.main import app
    from gym_fed.export import source

    begun: list[str] = []
    plain_init, plain_load = ModuleProcess.__init__, source._load

    def init(self: ModuleProcess, module: str, *given: Any) -> None:
        begun.append(module)
        plain_init(self, module, *given)

    def load(name: str) -> object:
        begun.append("loading")
        return plain_load(name)

    monkeypatch.setattr(ModuleProcess, "__init__", init)
    monkeypatch.setattr(source, "_load", load)
    stories, output = str(shared_folder / "models/stories260K"), str(tmp_path / "out")
    done = CliRunner().invoke(app, ["export", stories, "--format", name, "-o", output])
    assert done.exit_code == 0, done.output
    assert begun == [*modules, "loading"]


@pytest.mark.parametrize("name", ["gguf", "gguf_adapter", "onnx", "torch_export"])
def test_libraries_that_a_reader_imports_ahead_exist(name: str) -> None:
    from importlib import import_module

    for library in import_module(EXPORT_FORMATS.new(name).reading).LIBRARIES:
        if library != "llama_cpp":  # built from source, and not everywhere
            import_module(library)


@pytest.mark.slow  # a process that imports torch and the converter, for its speed only
def test_the_converter_imports_no_auto_round() -> None:
    code = (
        "import sys\nfrom gym_fed.export.gguf.convert import _converter, _skip_auto_round\n"
        "sys.path.insert(0, str(_converter()))\n_skip_auto_round()\nimport conversion\n"
        "from auto_round.utils.path_safety import resolve_within_directory\n"
        "print(sorted(name for name in sys.modules if name.startswith('auto_round')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "['auto_round', 'auto_round.utils', 'auto_round.utils.path_safety']"


def test_options_of_two_exports_share_no_processes() -> None:
    assert Options().processes is not Options().processes
