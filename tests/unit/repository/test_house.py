"""The rules of the house, held by reading the source: what no linter here checks."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gym_fed
from tests.support.sources import parsed
from tests.support.without_packages import TRAINER
from tools.version import versions

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = [
    ROOT / "gym_fed",
    ROOT / "server/gym_server",
    ROOT / "client/gym_client",
    ROOT / "quant/gym_quant",
]
BESIDES = [ROOT / "benchmarks", ROOT / "demo", ROOT / "tools", ROOT / ".ci"]
TESTS = ROOT / "tests"
GENERATED = ROOT / "gym_fed" / "trust" / "wire" / "_generated"
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
MOST_LINES = 400
# Only calls with such a word, or whose last name is such a one, are written out to be judged.
RISKY_WORDS = {"weights_only", "allow_pickle", "trust_remote_code", "rdzv_backend"}
RISKY_NAMES = {"load"}
UNPICKLING_COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
"""Calls of torch.distributed that unpickle what another process sent."""


def modules(*folders: Path) -> list[Path]:
    files = [f for folder in folders for f in sorted(folder.rglob("*.py"))]
    return [f for f in files if GENERATED not in f.parents and "__pycache__" not in f.parts]


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def imported(file: Path) -> Iterator[str]:
    """Top-level names of everything a module imports, at any depth of it."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def offences(file: Path) -> list[str]:
    """Calls that run code from data, or could."""
    found = [f"imports {name}" for name in imported(file) if name in UNSAFE_MODULES]
    for node in ast.walk(parsed(file)):
        if not isinstance(node, ast.Call):
            continue
        words = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg in RISKY_WORDS}
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        called = ast.unparse(node.func) if words or name in RISKY_NAMES else ""
        if called == "torch.load" and words.get("weights_only") != "True":
            found.append(f"line {node.lineno}: torch.load without weights_only=True")
        if words.get("rdzv_backend", "'static'") != "'static'":
            found.append(f"line {node.lineno}: this rendezvous unpickles what anyone writes to its store")
        if name in UNPICKLING_COLLECTIVES:
            found.append(f"line {node.lineno}: {name} unpickles")
        if words.get("allow_pickle") == "True" or words.get("trust_remote_code") == "True":
            found.append(f"line {node.lineno}: {called} may run what it reads")
    return found


def test_nothing_unpickles_or_runs_code_from_data() -> None:
    assert {name_of(file): found for file in modules(*PACKAGES, *BESIDES) if (found := offences(file))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        'LaunchConfig(rdzv_backend="c10d")',
        "dist.broadcast_object_list(values)",
    ],
)
def test_the_rule_against_unpickling_sees_what_it_must(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text, encoding="utf-8")
    assert offences(file)
    good = tmp_path / "good.py"
    good.write_text("torch.load(f, weights_only=True)\n", encoding="utf-8")
    assert offences(good) == []


def test_no_module_is_longer_than_a_reader_can_hold() -> None:
    lines = {f: len(f.read_text(encoding="utf-8").splitlines()) for f in modules(*PACKAGES, *BESIDES)}
    assert {name_of(file): count for file, count in lines.items() if count > MOST_LINES} == {}


def test_tables_of_the_packages_are_made_in_one_place() -> None:
    """``gym_fed.core.console`` shows every cell as text; a bare table of rich reads markup in what others wrote."""
    allowed = {"gym_fed/core/console.py"}
    found = {
        name_of(file)
        for file in modules(*PACKAGES)
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ImportFrom) and node.module == "rich.table"
        if "Table" in {alias.name for alias in node.names}
    }
    assert found <= allowed


def test_every_test_file_has_a_name_of_its_own() -> None:
    names = [file.name for file in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))  # pytest knows a file of the tests by its base name


def test_gym_quant_imports_torch_numpy_and_itself_only() -> None:
    allowed = {"gym_quant", "torch", "numpy", "triton"} | set(sys.stdlib_module_names)
    found = {name_of(f): set(imported(f)) - allowed for f in modules(ROOT / "quant/gym_quant")}
    assert {file: others for file, others in found.items() if others} == {}


def test_every_folder_of_gym_fed_has_its_place_in_the_import_contract() -> None:
    (layers,) = (c["layers"] for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    placed = {re.sub(r"[() ]", "", name) for layer in layers for name in re.split("[:|]", layer)}
    children = {
        f"gym_fed.{child.stem}"
        for child in (ROOT / "gym_fed").iterdir()
        if (child.suffix == ".py" or list(child.glob("*.py"))) and child.stem != "__init__"
    }
    assert children <= placed


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [line.partition("==") for line in lines if line and not line.startswith("#")]
    assert all(equals for _, equals, _ in found), "constraints.txt holds name==version lines only"
    return {canonicalize_name(name): version for name, _, version in found}


def test_constraints_pin_exact_public_releases() -> None:
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in pins().values())


EXTRAS = PROJECT["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    "line", [*PROJECT["project"]["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
)
def test_constraints_pin_every_dependency_inside_its_range(line: str) -> None:
    requirement = Requirement(line)
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


MODULES = {
    "galore-torch": "galore_torch",
    "apollo-torch": "apollo_torch",
    "pytorch-optimizer": "pytorch_optimizer",
    "liger-kernel": "liger_kernel",
    "nvidia-ml-py": "pynvml",
    "mlflow-skinny": "mlflow",
    "dp-accounting": "dp_accounting",
    "pillow": "PIL",
    "lm-eval": "lm_eval",
    "math-verify": "math_verify",
    "auto-round": "auto_round",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-grpc": "opentelemetry",
}
"""Packages whose module has another name."""


@cache
def named_modules() -> frozenset[str]:
    """Words of imports and of strings, without docstrings: some modules are loaded by name. ``web`` is of app.py."""
    found: set[str] = set()
    for file in [*modules(*PACKAGES), ROOT / "app.py"]:
        found.update(imported(file))
        prose = {id(n.value) for n in ast.walk(parsed(file)) if isinstance(n, ast.Expr)}
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                found.update(re.findall(r"\w+", node.value))
    return frozenset(found)


@pytest.mark.parametrize("extra", [name for name in EXTRAS if name != "dev"])
def test_the_code_loads_every_package_of_an_extra(extra: str) -> None:
    names = [Requirement(line).name for line in EXTRAS[extra]]
    assert [name for name in names if MODULES.get(name, name) not in named_modules()] == []


def test_the_extra_of_everything_has_every_requirement_of_the_others() -> None:
    others = [lines for name, lines in EXTRAS.items() if name not in ("all", "dev")]
    assert sorted(EXTRAS["all"]) == sorted({line for lines in others for line in lines})
    assert {"all", "train", "serve", "hub", "client", "distributed", "eval", "web"} <= EXTRAS.keys()


def test_the_requirements_of_a_hub_are_the_projects_own_without_the_trainer() -> None:
    lines = (ROOT / "requirements-hub.txt").read_text(encoding="utf-8").splitlines()
    rows = [Requirement(line) for line in lines if not line.startswith("#")]
    project = [Requirement(line) for line in [*PROJECT["project"]["dependencies"], *EXTRAS["hub"]]]
    wanted = {row.name: row.extras for row in project if row.name not in TRAINER}
    assert {row.name: row.extras for row in rows} == wanted
    assert {row.name: str(row.specifier) for row in rows} == {
        row.name: f"=={pins()[canonicalize_name(row.name)]}" for row in rows
    }
    assert set(TRAINER) <= {row.name for row in project}


def test_the_version_is_the_same_in_every_place() -> None:
    assert gym_fed.__version__ == PROJECT["project"]["version"]
    assert {one for found in versions(ROOT).values() for one in found} == {gym_fed.__version__}
    assert f"## [{gym_fed.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_stubs_are_what_the_wire_contract_gives() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/gen_proto.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


HELP_PROBE = """
import importlib, sys, typer, click
module, _, attribute = {entry!r}.partition(":")
app = importlib.import_module(module.replace(".entry", ".main")).app
def walk(command, context):
    command.get_help(context)
    for name, child in getattr(command, "commands", {{}}).items():
        walk(child, click.Context(child, parent=context, info_name=name))
command = typer.main.get_command(app)
walk(command, click.Context(command, info_name={name!r}))
print("heavy:", *sorted({{"torch", "transformers", "flwr", "datasets", "numpy", "grpc"}} & set(sys.modules)))
"""


@pytest.mark.parametrize("name", sorted(PROJECT["project"]["scripts"]))
def test_the_help_of_every_command_imports_nothing_heavy(name: str) -> None:
    probe = HELP_PROBE.format(entry=PROJECT["project"]["scripts"][name], name=name)
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["heavy:"]


def tracked_text_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [f for f in files if f.is_file() and b"\0" not in f.read_bytes()[:8192]]


def test_no_tracked_file_names_somebodys_machine() -> None:
    place = re.compile(r"(?<![\w.~$}])/(home|root|work|Users)/\w")
    found = [
        f"{name_of(file)}:{number}"
        for file in tracked_text_files()
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if place.search(line)
    ]
    assert found == []


PUBLIC = {
    "gym_fed": {"Experiment", "GymError", "Trainer", "TrainingConfig"},
    "gym_fed.data": {"DataPipeline", "DatasetRegistry"},
    "gym_fed.base.downloads": {
        "DownloadOffer",
        "ensure_dataset",
        "ensure_model",
        "missing_model",
        "pull_model",
    },
    "gym_fed.evaluation": {
        "EvalResults",
        "Evaluator",
        "Grader",
        "exact_match",
        "grade_answers",
        "layer_errors",
    },
    "gym_fed.personalization": {"PersonalizedTrainer"},
    "gym_fed.quantization": {
        "AggregationMethod",
        "BitDeltaConfig",
        "BitDeltaQuantizer",
        "DeltaQuantConfig",
        "DeltaSoup",
        "DeltaSoupConfig",
        "QuantMethod",
    },
    "gym_fed.registry": {"DataUsed", "ModelManifest", "ModelRegistry", "ModelVersion"},
    "gym_fed.training.loops": {"DPO", "GRPO", "PPO", "SFT", "StringThread"},
    "gym_server.strategy": {"DeltaSoup", "DeltaSoupStrategy"},
}
"""The names that users import from a package; every other package's ``__init__`` offers none."""


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_is_what_it_says(package: str) -> None:
    module = importlib.import_module(package)
    assert PUBLIC[package] <= set(module.__all__)
    for name in [
        *module.__all__,
        *module.__all__,
    ]:  # twice: a submodule of the same name would hide it by now
        assert not inspect.ismodule(getattr(module, name)), name
    with pytest.raises(AttributeError, match=package):
        module.no_such_name  # noqa: B018


def test_only_public_packages_offer_names_of_their_modules() -> None:
    kernels = {"gym_quant", "gym_quant.kernels"}  # a library of its own, with a face of its own
    offering = {
        ".".join(file.relative_to(folder).parent.parts)
        for folder in (ROOT, ROOT / "server", ROOT / "client", ROOT / "quant")
        for file in folder.glob("gym_*/**/__init__.py")
        if re.search(r"^(__all__\b|def __getattr__)", file.read_text(), re.MULTILINE)
    }
    assert offering <= PUBLIC.keys() | kernels


@pytest.mark.parametrize("command", ["gym_fed.cli.main", "gym_server.cli.main", "gym_client.cli.main"])
def test_every_command_answers_in_json(command: str) -> None:
    def without(found: click.Command, path: str) -> list[str]:
        if isinstance(found, click.Group):
            return [name for key, sub in found.commands.items() for name in without(sub, f"{path} {key}")]
        return [] if any("--json" in option.opts for option in found.params) else [path]

    assert without(typer.main.get_command(importlib.import_module(command).app), "") == []
