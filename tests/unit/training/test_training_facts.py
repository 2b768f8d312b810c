"""What is true of an algorithm, tuning method or optimiser stands on its class: none is known by its name elsewhere."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from gym_fed.config.schema.open_keys import OpenModel
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS, FEATURES, TUNING
from tests.support.sources import ROOT, our_files, parsed

CHOOSES = {"algorithm", "finetuning", "optimizer"}
TRANSLATES = ROOT / "gym_fed" / "interop" / "llamafactory"
NAMED_FOR_ONE = ("gym_fed/train.py", "gym_fed/config/recipes.py")
"""``run_sft`` is for one algorithm, and presets of sizes are the rates of one."""


def lines_by_name(tree: ast.Module) -> list[int]:
    """Lines that hold what a config chooses against words."""
    lines = []
    for node in ast.walk(tree):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            sides = [node.func.value, *node.args] if node.func.attr in ("startswith", "endswith") else []
        if any(map(_chooses, sides)) and any(map(_is_a_word, sides)):
            lines.append(node.lineno)
    return lines


def _chooses(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in CHOOSES
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.slice.value in CHOOSES
    return isinstance(node, ast.Name) and node.id in CHOOSES


def _is_a_word(node: ast.expr) -> bool:
    """A text, a group of texts, or a constant of the module, which is written in capitals."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_is_a_word, node.elts))
    if isinstance(node, ast.Name):
        return node.id.strip("_").isupper() and node.id not in (
            "ALGORITHMS",
            "TUNING",
            "OPTIMIZERS",
            "FEATURES",
        )
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != "none"


@pytest.mark.parametrize(
    "line",
    [
        'if config.algorithm in ("ppo", "grpo"): ...',
        "if config.algorithm in _REWARDED: ...",
        'if recipe.finetuning != "lora": ...',
        'if recipe["finetuning"] == "lora": ...',
        'if self.optimizer.startswith("schedulefree_"): ...',
        'if algorithm == "dpo": ...',
    ],
)
def test_the_search_finds_a_name_that_is_tested(line: str) -> None:
    assert lines_by_name(ast.parse(line)) == [1]


def test_nothing_is_known_by_the_name_of_an_algorithm_a_tuning_method_or_an_optimiser() -> None:
    found = {
        str(file.relative_to(ROOT)): lines
        for file in our_files(without=TRANSLATES)
        if (lines := lines_by_name(parsed(file)))
    }
    assert sorted(found) == sorted(NAMED_FOR_ONE)


def test_every_key_that_is_a_feature_of_ours_and_every_section_is_a_field() -> None:
    fields = TrainingConfig.model_fields
    assert set(FEATURES.own()) <= set(fields)
    for kind in (ALGORITHMS, TUNING):
        for name in TrainingConfig.sections(kind):
            assert fields[name].default is None, name
    assert {"dpo", "npo"} <= set(TrainingConfig.sections(ALGORITHMS))
    assert set(TrainingConfig.sections(TUNING)) == set(TUNING.own()) - {"full"}
    assert issubclass(TrainingConfig, OpenModel)


def test_no_fact_of_an_algorithm_or_a_tuning_method_costs_torch() -> None:
    code = (
        "import sys\n"
        "from gym_fed.config.train.training import TrainingConfig\n"
        "from gym_fed.config.hub.task import TaskSpec, TrainingRecipe\n"
        "TrainingConfig(), TrainingRecipe()\n"
        "members = [m for m in sys.modules if m.startswith('gym_fed.training.')]\n"
        "assert not members, members\n"
        "TrainingConfig.model_json_schema(), TaskSpec.model_json_schema()\n"
        "from gym_fed.core.registries import ALGORITHMS, FEATURES, TUNING\n"
        "for kind in (ALGORITHMS, FEATURES, TUNING):\n"
        "    for name in kind.own():\n"
        "        kind.type_of(name)\n"
        "        assert not {'torch', 'transformers', 'trl', 'peft'} & set(sys.modules), (kind.kind, name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
