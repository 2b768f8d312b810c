"""Properties of a codec stand on its class: no file but its own compares a codec's name or class."""

from __future__ import annotations

import ast
import re

import pytest
from gym_quant.registry import CODECS

from tests.support.sources import ROOT, our_files, parsed

CODEC_FILES = ROOT / "quant" / "gym_quant" / "codecs"
NAMES = frozenset(CODECS.own())
CLASSES = frozenset({CODECS.type_of(name).__name__ for name in NAMES} | {"LevelCodec", "UniformCodec"})
TUNING = ("finetuning", "finetuning_type", "method", "reward_model_type")
"""`lora` is also a tuning method's name: what is compared there is a tuning method, in configs of ours and others."""
ALLOWED = {
    'gym_fed/interop/training_keys.py: return value == "bitdelta" or (isinstance(value, dict) '
    'and value.get("method") == "bitdelta")': "the word that others write for a one-bit delta",
    'gym_fed/interop/serving_keys.py: if value in ("int8", "int4"):': "words that others write for a base's bits",
    'gym_fed/export/formats/onnx.py: return self.quantization(options) == "int8"': "a quantization of onnxruntime",
    'gym_fed/export/gguf/adapter.py: if kind is None or kind.contents() != "lora" or alpha is None:': (
        "the word for the kind of adapter in a GGUF file"
    ),
    "gym_fed/serving/engines/own.py: if config.engine.draft_model is None and "
    "(config.base_format == DRAFT_FORMAT or not on_cpu):": "a number format of a base",
    "gym_fed/base/modeling/attention_state.py: others = sorted(set(layers) - _ATTENTION_LAYERS)": (
        "dense is a kind of layer in the configs of models"
    ),
    "quant/gym_quant/kernels/attention_reference.py: if dtype not in KV_DTYPES:": "a number format of a KV cache",
    'quant/gym_quant/kernels/attention_reference.py: if dtype == "int8":': "a number format of a KV cache",
    'quant/gym_quant/kernels/attention_reference.py: scales = 8 * BLOCK_TOKENS if dtype == "int8" else 0': (
        "a number format of a KV cache"
    ),
}
"""File and line's text to the reason why a codec's name is tested there."""


def named_lines(tree: ast.Module) -> list[int]:
    """Lines that compare with a codec's name, look one up in a group, or ask for an instance of a codec's class."""
    groups = _groups(tree)
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            if any(_names(operand, groups) for operand in operands) and not any(map(_is_tuning, operands)):
                lines.append(node.lineno)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.Sub):
            if _names(node.left, groups) or _names(node.right, groups):
                lines.append(node.lineno)
        elif (isinstance(node, ast.MatchValue) and _names(node.value, groups)) or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
            and _classes(node.args[1])
        ):
            lines.append(node.lineno)
    return sorted(set(lines))


def _groups(tree: ast.AST) -> frozenset[str]:
    """Constants of the module that hold codecs' names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _names(node.value, frozenset()):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return frozenset(found)


def _names(node: ast.expr, groups: frozenset[str]) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(_names(element, groups) for element in node.elts)
    if isinstance(node, ast.Starred):
        return _names(node.value, groups)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("frozenset", "set")
    ):
        return any(_names(one, groups) for one in node.args)
    if isinstance(node, ast.Name):
        return node.id in groups
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES


def _classes(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return any(map(_classes, node.elts))
    if isinstance(node, ast.BinOp):
        return _classes(node.left) or _classes(node.right)
    return isinstance(node, ast.Name) and node.id in CLASSES


def _is_tuning(node: ast.expr) -> bool:
    name = getattr(node, "attr", getattr(node, "id", ""))
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        name = node.slice.value
    return name in TUNING


@pytest.mark.parametrize(
    "line",
    [
        'if record.codec == "bitdelta": ...',
        'if "lora" != record.codec: ...',
        'if codec in ("int8", "int4"): ...',
        '_COARSE = {"binary", "ternary"}\nif name in _COARSE: ...',
        '_LEVELS = ("int2",)\nif used & {"bitdelta", *_LEVELS}: ...',
        "if isinstance(codec, LevelCodec): ...",
        "if isinstance(codec, (Lora, Dense)): ...",
        'match codec:\n    case "dense": ...',
    ],
)
def test_the_search_finds_a_name_that_is_tested(line: str) -> None:
    assert len(named_lines(ast.parse(line))) == 1


@pytest.mark.parametrize(
    "line",
    [
        'if recipe.finetuning == "lora": ...',
        'codec = get_codec("dense")',
        'CodecPolicy(codec="lora", lora_rank=1)',
    ],
)
def test_choosing_a_codec_or_testing_a_tuning_method_is_no_test_of_a_name(line: str) -> None:
    assert named_lines(ast.parse(line)) == []


def test_no_file_but_its_own_tests_a_codecs_name() -> None:
    found = {}
    mentions = re.compile("|".join([*(f"[\"']{name}[\"']" for name in NAMES), *CLASSES]))
    for file in our_files(without=CODEC_FILES):
        source = file.read_text(encoding="utf-8")
        for line in named_lines(parsed(file)) if mentions.search(source) else ():
            text = source.splitlines()[line - 1].strip()
            found[f"{file.relative_to(ROOT)}: {text}"] = line
    assert sorted(found) == sorted(ALLOWED)
