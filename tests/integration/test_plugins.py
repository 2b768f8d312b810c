"""A separate package, built and installed by pip, in every command and config that names its kinds; and without it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import warm
from tests.support.hub import BIN, QUICK_ENROLMENT
from tests.support.wait import SECONDS

SOURCE = Path(__file__).parents[1] / "plugins" / "gym_fed_example"
ROWS = [
    {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "abc" * 2}]}
    for i in range(8)
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the package into; built from a copy, with no index to ask."""
    folder = tmp_path_factory.mktemp("plugins")
    return install(folder / "source", folder / "site")


def install(source: Path, site: Path, version: str = "1.0") -> Path:
    shutil.copytree(SOURCE, source)
    project = source / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "1.0"', f'version = "{version}"'))
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", site)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return site


def run(site: Path | None, *command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command of ours; ``site`` None has no plug-ins."""
    name, *arguments = map(str, command)
    if name != "python":
        return warm.run([name, *arguments], cwd=cwd, env=environment(site))
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment(site),
    )


def environment(site: Path | None) -> dict[str, str]:
    paths = [str(Path(__file__).parents[2])] + ([] if site is None else [str(site)])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def good(site: Path, *command: object, cwd: Path | None = None) -> str:
    done = run(site, *command, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def python(site: Path, text: str, *arguments: object) -> str:
    return good(site, "python", "-c", text, *arguments)


def rows_file(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


LISTED = """
import json, sys
from gym_fed.config.hub.soup import AggregationMethod, SoupRecipe
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.hub.soup import DeltaSoupConfig
from gym_fed.core.registries import ALL
SoupRecipe.model_json_schema(), DeltaSoupConfig.model_json_schema()
imported = "gym_fed_example" in sys.modules  # sections of a training config are of members, which it then imports
print(json.dumps({
    "names": [n for kind in ALL for n in kind.names() if n.startswith("example_")],
    "schemas": [json.dumps(m.model_json_schema()) for m in (SoupRecipe, TrainingConfig, DeltaSoupConfig)],
    "member": AggregationMethod.EXAMPLE_MIDDLE.value,
    "imported": imported,
}))
"""


def test_names_of_an_installed_package_are_in_schemas_and_enums_and_rules_are_not_imported(
    site: Path,
) -> None:
    listed = json.loads(python(site, LISTED))
    assert sorted(listed["names"]) == [
        "example_bytes",
        "example_head",
        "example_middle",
        "example_sft",
        "example_vowels",
    ]
    recipe, training, soup = listed["schemas"]
    assert "example_middle" in recipe
    assert "example_middle" in soup
    assert "example_sft" in training
    assert "example_head" in training
    assert listed["member"] == "example_middle"
    assert listed["imported"] is False


@pytest.mark.slow  # a package is built and installed
def test_doctor_lists_members_of_an_installed_package_with_their_version(site: Path) -> None:
    text = (
        "from gym_fed.doctor.checks.plugins import Plugins\n"
        "print(*(f.level.value + '|' + f.check + '|' + f.finding for f in Plugins().findings()), sep='\\n')"
    )
    lines = python(site, text).splitlines()
    assert len(lines) == 5
    assert any(
        line.startswith("ok|plug-in: codec example_bytes|gym-fed-example 1.0, sha256 ") for line in lines
    )


def training(folder: Path, **more: Any) -> Path:
    config = {
        "algorithm": "example_sft",
        "example_sft": {"factor": 2.0},
        "finetuning": "example_head",
        "model": "gym-nano",
        "data": [{"path": str(rows_file(folder))}],
        "output_dir": str(folder / "run"),
        "max_steps": 3,
        "save_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "device": "cpu",
        **more,
    }
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.slow  # two runs of processes
def test_gym_train_runs_an_algorithm_and_a_tuning_method_of_an_installed_package(
    site: Path, tmp_path: Path
) -> None:
    trained = json.loads(good(site, "gym", "train", training(tmp_path), "--json"))
    assert trained["steps"] == 3
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["plugins"]
    assert [(r["kind"], r["name"], r["distribution"], r["version"]) for r in recorded] == [
        ("algorithm", "example_sft", "gym-fed-example", "1.0"),
        ("tuning method", "example_head", "gym-fed-example", "1.0"),
    ]
    (tmp_path / "run" / "result.json").unlink()  # as if it had been stopped before its end
    without = run(None, "gym", "train", tmp_path / "train.yaml")
    assert without.returncode != 0
    assert "algorithm 'example_sft' of gym-fed-example 1.0" in without.stderr
    assert "which is not installed" in without.stderr
    assert "pip install gym-fed-example==1.0" in without.stderr
    other = install(tmp_path / "source", tmp_path / "site", "1.1")
    refused = run(other, "gym", "train", tmp_path / "train.yaml")
    assert "but the installed one is from gym-fed-example 1.1" in refused.stderr


def test_gym_grade_and_gym_train_use_a_grader_of_an_installed_package(site: Path, tmp_path: Path) -> None:
    graders = tmp_path / "graders.yaml"
    graders.write_text("graders: [{grader: example_vowels, vowels: ab}]\n")
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"prompt": "x", "completion": "abcd"}\n')
    graded = json.loads(good(site, "gym", "grade", answers, "--graders", graders, "--json"))
    assert "0.5" in json.dumps(graded)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "say", "answer": "a"}\n' * 8)
    config = training(
        tmp_path,
        algorithm="grpo",
        finetuning="full",
        data=[{"path": str(prompts)}],
        graders=[{"grader": "example_vowels"}],
        max_steps=1,
        grpo={"num_generations": 2, "max_completion_length": 8},
    )
    values = yaml.safe_load(config.read_text())
    values.pop("example_sft")
    config.write_text(yaml.safe_dump(values))
    assert json.loads(good(site, "gym", "train", config, "--no-check", "--json"))["steps"] == 1
    assert [r["name"] for r in json.loads((tmp_path / "run" / "run.json").read_text())["plugins"]] == [
        "example_vowels"
    ]


WRITTEN = """
import sys, torch
from gym_quant import get_codec
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.base.models import load_model
tensors = model_tensors(load_model("gym-nano").model)
spec = BaseSpec.of(tensors, "gym-nano")
name = next(n for n, t in tensors.items() if n.endswith("q_proj.weight"))
shape = tuple(tensors[name].shape)
for value, path in enumerate(sys.argv[1:], 1):
    made = get_codec("example_bytes").encode(torch.full(shape, float(value)) / 100)
    write_delta(path, [DeltaEntry(name, shape, "example_bytes", made.params, lambda m=made: m.payload)], spec)
"""

MERGED = """
import sys, torch
from gym_fed.delta.file import DeltaFile
from gym_fed.quantization import AggregationMethod, DeltaSoup, DeltaSoupConfig
soup = DeltaSoup(DeltaSoupConfig(method="example_middle", base_model="gym-nano", norm_ratio=None))
assert soup.config.method is AggregationMethod.EXAMPLE_MIDDLE
for user, path in enumerate(sys.argv[2:]):
    soup.contribute(user_id=str(user), model=path)
soup.aggregate().save(sys.argv[1] + ".py")
for path in (sys.argv[1], sys.argv[1] + ".py"):
    with DeltaFile.open(path) as file:
        print([round(float(file.decode(n).abs().max()), 4) for n in file.names])
"""


@pytest.fixture(scope="module")
def deltas(site: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three deltas of one tensor by the package's codec: 0.01, 0.02 and 0.03 everywhere."""
    folder = tmp_path_factory.mktemp("deltas")
    paths = [folder / f"{name}.gymdelta" for name in "abc"]
    python(site, WRITTEN, *paths)
    return paths


@pytest.mark.slow  # a package is built and installed, and five processes import torch
def test_soup_merge_and_delta_soup_use_an_aggregator_and_read_a_codec_of_an_installed_package(
    site: Path, deltas: list[Path], tmp_path: Path
) -> None:
    soup = tmp_path / "soup.gymdelta"
    merge = ("gym", "soup", "merge", *deltas, "--rule", "example_middle")
    assert (
        json.loads(good(site, *merge, "-o", soup, "--codec", "exact", "--json"))["rule"] == "example_middle"
    )
    assert python(site, MERGED, soup, *deltas).splitlines() == ["[0.02]", "[0.02]"]
    rules = json.loads(good(site, "gym", "soup", "rules", "--json"))
    assert {"example_middle"} <= {rule["name"] for rule in rules}
    without = run(None, *merge, "-o", tmp_path / "x.gymdelta")
    assert without.returncode != 0
    assert "unknown rule 'example_middle'" in without.stderr
    unread = run(None, "gym", "delta", "show", deltas[0])
    assert unread.returncode != 0
    assert "example_bytes" in unread.stderr


SERVED = """
import sys
from pathlib import Path
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from tests.support.variants import merged, off, write_random_delta
from tests.unit.serving.test_multi_variant_step import llama, reference
from tests.unit.serving.test_multi_variant_packed import LONG, answers
model = llama()
coding = lambda name, shape: ("example_bytes", {}) if len(shape) == 2 else None
path = write_random_delta(model, Path(sys.argv[1]), coding, seed=1)
with MultiVariantModel(model) as served:
    bulk, _ = answers(served, [path])
print(off(bulk[0], reference(merged(model, path), LONG)[-1]), off(bulk[0], reference(model, LONG)[-1]))
"""


@pytest.mark.slow  # trains a variant and serves it
def test_a_variant_in_a_codec_of_an_installed_package_is_served(site: Path, tmp_path: Path) -> None:
    from_merged, from_base = map(float, python(site, SERVED, tmp_path / "variant.gymdelta").split())
    assert from_merged < 1e-4 < from_base


@pytest.mark.slow  # five processes that import torch; merging reads the same codec
def test_gym_delta_encode_writes_by_a_codec_of_an_installed_package(
    site: Path, deltas: list[Path], tmp_path: Path
) -> None:
    tuned, written = tmp_path / "tuned", tmp_path / "written.gymdelta"
    good(site, "gym", "delta", "apply", "gym-nano", deltas[0], "-o", tuned)
    good(site, "gym", "delta", "encode", "gym-nano", tuned, "-o", written, "--codec", "example_bytes")
    assert "example_bytes" in good(site, "gym", "delta", "show", written)
    without = run(
        None, "gym", "delta", "encode", "gym-nano", tuned, "-o", tmp_path / "not", "--codec", "example_bytes"
    )
    assert without.returncode != 0
    assert "example_bytes" in without.stderr


def hub_config(folder: Path, base: Path, **more: Any) -> None:
    file = folder / "gym-server.yaml"
    config = yaml.safe_load(file.read_text())
    config |= {
        "listen": "127.0.0.1:0",
        "limits": {**config.get("limits", {}), **QUICK_ENROLMENT},
        "soup": {"aggregator": "example_middle", "num_malicious_nodes": 0},
        "recipe": {"max_steps": 2, "per_device_train_batch_size": 4, "max_length": 64},
        **more,
    }
    config["rounds"] = {"num_rounds": 1, "min_contributors": 1, "deadline_seconds": 240}
    file.write_text(yaml.safe_dump(config))


@pytest.mark.slow  # ten processes that import torch
def test_a_round_is_merged_recorded_and_replayed_with_members_of_an_installed_package(
    site: Path, tmp_path: Path, tiny_base: Path
) -> None:
    hub = tmp_path / "hub"
    good(site, "gym-server", "init", "--dir", hub, "--enrolment", "open", "--base", tiny_base)
    hub_config(hub, tiny_base, codec={"codec": "example_bytes"})
    with open(tmp_path / "hub.log", "wb") as log:
        server = subprocess.Popen(
            [BIN / "gym-server", "run", "--dir", hub, "--json", "--exit-when-done"],
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(site),
        )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line, (tmp_path / "hub.log").read_text()[-3000:]
        event = json.loads(line)
        join = [
            "gym-client", "join", "--server", f"127.0.0.1:{event['port']}", "--fingerprint", event["fingerprint"],
            "--yes", "--data", rows_file(tmp_path), "--base", tiny_base,
        ]  # fmt: skip
        without = run(None, *join, "--name", "bob", "--home", tmp_path / "bob")
        assert without.returncode != 0
        assert "codec 'example_bytes' of gym-fed-example 1.0" in without.stderr
        assert "pip install gym-fed-example==1.0" in without.stderr
        good(site, *join, "--name", "ann", "--home", tmp_path / "ann")
        assert server.wait(timeout=SECONDS) == 0, (tmp_path / "hub.log").read_text()[-3000:]
    finally:
        server.kill()
        server.wait()
    entries = json.loads(good(site, "gym-server", "ledger", "show", "--dir", hub, "--json"))
    version = next(e["body"] for e in entries if e["kind"] == "version")
    assert [(r["kind"], r["name"], r["version"]) for r in version["plugins"]] == [
        ("aggregator", "example_middle", "1.0"),
        ("codec", "example_bytes", "1.0"),
    ]
    replayed = json.loads(good(site, "gym-server", "ledger", "replay", "1", "--dir", hub, "--json"))
    assert replayed["replayed"] == replayed["soup"]
    without = run(None, "gym-server", "ledger", "replay", "1", "--dir", hub)
    assert without.returncode != 0
    assert "round 1 needs aggregator 'example_middle' of gym-fed-example 1.0" in without.stderr
    assert "which is not installed" in without.stderr
    other = install(tmp_path / "source", tmp_path / "other", "1.1")
    refused = run(other, "gym-server", "ledger", "replay", "1", "--dir", hub)
    assert refused.returncode != 0
    assert "round 1 needs aggregator 'example_middle' of gym-fed-example 1.0" in refused.stderr
    assert "but the installed one is from gym-fed-example 1.1" in refused.stderr
