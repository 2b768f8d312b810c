"""Checks of the source: only ``gym_fed.core.bounded`` evaluates untrusted templates and patterns."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.support.sources import ROOT, parsed

PACKAGES = ("gym_fed", "server/gym_server", "client/gym_client", "quant/gym_quant")
TEMPLATES = {
    "gym_fed/evaluation/harness/isolation.py": "templates of the registry's suites, compiled once",
    "gym_fed/evaluation/suites/sandbox.py": "the environment of suites' templates",
    "gym_fed/evaluation/suites/rendering.py": "templates of the registry's suites; untrusted ones are `sandboxed`",
}
"""Modules outside ``gym_fed.core.bounded`` that may render Jinja, and the source of their templates."""
PATTERNS = {
    "gym_fed/evaluation/suites/rendering.py": "regex_replace, which a suite's template calls in the child process",
    "gym_fed/export/process.py": "numbers of errors",
    "gym_fed/registry/manifest.py": "a number of characters",
    "gym_fed/serving/filter/rules.py": "rules: an operator's, after its ways to match were counted, and our own",
    "gym_fed/serving/openai/chat_template.py": "a mark of random hexadecimal digits",
    "gym_fed/serving/openai/tool_formats/_json_calls.py": "the beginnings of this project's tool formats",
    "gym_fed/training/model/peft_models.py": "an adapter, tried in another process before (modeling/patterns.py)",
}
"""Modules that build a regular expression from a value that is not a literal or a constant, and its source."""
_CONVERTER = "gym_fed/export/gguf/convert.py"
"""Wraps the loader for llama.cpp's converter, which copies templates without rendering them."""
_SEARCHES = {"compile", "search", "match", "fullmatch", "sub", "findall", "finditer", "split"}
_RENDERERS = {"render_jinja_template", "_compile_jinja_template", "from_string"}


@cache
def _modules() -> list[tuple[str, ast.Module]]:
    """Return every module outside ``gym_fed.core.bounded``, with its path."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    read = [(file.relative_to(ROOT).as_posix(), file) for file in files]
    return [(place, parsed(file)) for place, file in read if not place.startswith("gym_fed/core/bounded/")]


def _names(tree: ast.Module) -> set[str]:
    """Return names that a module imports or reads as attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def _takes_a_built_pattern(node: ast.AST) -> bool:
    """True for a call of ``re`` whose pattern is neither a literal nor a constant of its module."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
        return False
    if ast.unparse(node.func.value) != "re" or node.func.attr not in _SEARCHES:
        return False
    pattern = node.args[0]
    parts = [one.value for one in ast.walk(pattern) if isinstance(one, ast.FormattedValue)]
    parts = [one for one in parts if not ast.unparse(one).startswith("re.escape(")]
    variables = parts if isinstance(pattern, ast.JoinedStr) else [pattern]
    return not all(
        isinstance(one, ast.Constant) or (isinstance(one, ast.Name) and one.id.isupper()) for one in variables
    )


def test_no_other_module_renders_a_template() -> None:
    found = {
        place
        for place, tree in _modules()
        if _names(tree) & _RENDERERS
        or any(
            isinstance(node, ast.ImportFrom) and node.module == "jinja2.sandbox" for node in ast.walk(tree)
        )
    }
    assert found == set(TEMPLATES)


def test_every_module_that_loads_a_tokenizer_binds_its_templates() -> None:
    loaders = {}
    for place, tree in _modules():
        names = _names(tree)
        if names & {"AutoTokenizer", "AutoProcessor"} and "from_pretrained" in names:
            loaders[place] = "bind_templates" in names
    assert loaders.pop(_CONVERTER) is False
    assert loaders
    assert [place for place, binds in loaders.items() if not binds] == []


def test_no_other_module_builds_a_pattern() -> None:
    found = {place for place, tree in _modules() if any(map(_takes_a_built_pattern, ast.walk(tree)))}
    assert found == set(PATTERNS)


def _parses_json(step: ast.stmt) -> bool:
    calls = (one.func for one in ast.walk(step) if isinstance(one, ast.Call))
    return any(
        isinstance(f, ast.Attribute) and f.attr in ("load", "loads") and ast.unparse(f.value) == "json"
        for f in calls
    )


def test_whoever_catches_invalid_json_also_catches_long_numbers_and_deep_nesting() -> None:
    """``json.loads`` raises ``ValueError`` for a number of 5,000 digits and ``RecursionError`` for 1,000 brackets."""
    found = []
    for place, tree in _modules():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Try) and any(map(_parses_json, node.body))):
                continue
            caught = {ast.unparse(one) for each in node.handlers if each.type for one in _each(each.type)}
            nesting = caught & {"RecursionError", "RuntimeError", "Exception"}
            if caught & {"ValueError", "json.JSONDecodeError"} and not ("ValueError" in caught and nesting):
                found.append(f"{place}:{node.lineno}")
    assert found == []


def _each(caught: ast.expr) -> list[ast.expr]:
    return caught.elts if isinstance(caught, ast.Tuple) else [caught]


OWN_YAML = {
    "gym_fed/core/plain_yaml.py",  # the bounded loader
    "gym_fed/evaluation/suites/definitions.py",  # the installed harness
    "gym_fed/evaluation/probe/prompts.py",  # these read files of the package
    "gym_fed/config/recipes.py",
    "gym_fed/config/hub/sections.py",
    "gym_fed/config/train/catalogue.py",
    "gym_fed/cli/completion.py",
}


def test_no_other_module_reads_yaml_without_bounds() -> None:
    found = {
        file.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if re.search(r"yaml\.(safe_load|load|unsafe_load|full_load)(_all)?\(", file.read_text())
    }
    assert found == OWN_YAML
