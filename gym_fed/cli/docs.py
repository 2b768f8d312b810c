"""`gym docs`: show the installed guides, and build the reference pages from the code of this installation."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.core.console import AsJson, out, print_result
from gym_fed.core.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from gym_fed.interop.draft import Alias

BUILT_PAGES = ("config", "api", "aliases", "members", "metrics")
"""Names of the built pages."""


def built_page(name: str) -> str:
    """Return the Markdown of a page of ``BUILT_PAGES``."""
    pages = {
        "config": config_page,
        "api": api_page,
        "aliases": aliases_page,
        "members": members_page,
        "metrics": metrics_page,
    }
    return pages[name]()


CONFIG_FILES = {
    "A training file: `gym train`": "gym_fed.config.train.training:TrainingConfig",
    "A hub: `gym-server.yaml`": "gym_fed.config.hub.server:ServerConfig",
    "A contributor's limits: `policy.yaml`": "gym_client.agent.policy:Policy",
    "A server of variants: `serving.yaml`": "gym_fed.config.serving:ServingConfig",
}
"""The headings of the page, with the schema of each file."""
_MAX_CHOICES = 12
_MAX_WORDS = 22
_TYPES = {"integer": "integer", "string": "text", "boolean": "true or false", "object": "keys"}
_CONFIG_INTRODUCTION = """\
# Every key of every file

The keys of the four config files: type, default and purpose. A key that is not listed
is refused with file, line and column. `--set section.key=value` sets a key for one command.

The schema has the full description of each key: `gym configs schema --output train.schema.json`. With
`# yaml-language-server: $schema=train.schema.json` as a file's first line, an editor completes and checks its keys.
"""


def config_page() -> str:
    """Return a table for each section of each file."""
    parts = [_CONFIG_INTRODUCTION]
    for title, place in CONFIG_FILES.items():
        module, name = place.split(":")
        schema = getattr(importlib.import_module(module), name).model_json_schema()
        parts.append(f"## {title}\n\n" + "\n".join(config_sections(schema)) + "\n")
    return "\n".join(parts)


def config_sections(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a schema's table, then of its sections' tables, each section once."""
    pending: list[tuple[str, dict[str, Any]]] = [("", schema)]
    seen: set[str] = set()
    while pending:
        path, section = pending.pop(0)
        if path:
            yield f"\n### `{path}`\n"
        if path and (text := section.get("description")):
            yield f"{_first_sentence(text)}\n"
        yield "| key | takes | default | |\n|---|---|---|---|"
        for key, field in section.get("properties", {}).items():
            name = _section_name(field)
            below = f"{path}.{key}" if path else key
            if name is not None and name not in seen:
                seen.add(name)
                pending.append((below, schema["$defs"][name]))
            text = field.get("description") or (schema["$defs"][name].get("description", "") if name else "")
            yield f"| `{key}` | {_type(field, schema)} | {_default(field, name)} | {_first_sentence(text)} |"


def _section_name(field: dict[str, Any]) -> str | None:
    """Return the section that is the value of a key, or the element of its list."""
    for part in (field, *field.get("anyOf", ()), *field.get("allOf", ()), field.get("items", {})):
        if "$ref" in part:
            return str(part["$ref"].rpartition("/")[2])
        if "$ref" in part.get("items", {}):
            return str(part["items"]["$ref"].rpartition("/")[2])
    return None


def _type(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return a key's type as text, with its limits."""
    if "anyOf" in field:
        parts = [_type(part, schema) for part in field["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(parts))
    if "$ref" in field:
        target = schema["$defs"][field["$ref"].rpartition("/")[2]]
        return _type(target, schema) if "properties" not in target else "keys"
    if "enum" in field or "const" in field:
        names = [json.dumps(value).strip('"') for value in field.get("enum", [field.get("const")])]
        shown = ", ".join(f"`{name}`" for name in names[:_MAX_CHOICES])
        return shown + (", ..." if len(names) > _MAX_CHOICES else "")
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}), schema)}"
    name: str = field.get("type", "any")
    return _TYPES.get(name, name) + _limits(field)


def _limits(field: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[word]:g}" for word, sign in signs.items() if word in field]
    return f" {', '.join(limits)}" if limits else ""


def _default(field: dict[str, Any], section: str | None) -> str:
    if "default" not in field or (section is not None and field["default"] is not None):
        return ""
    value = field["default"]
    return "none" if value is None else f"`{json.dumps(value, ensure_ascii=False)}`"


def _first_sentence(text: str) -> str:
    """Return the first sentence of a description; ``gym configs schema`` has the rest."""
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(text.split()))[0]
    words = sentence.split("; ")[0]
    if len(words.split()) > _MAX_WORDS:
        words = re.sub(r" \([^()]*\)", "", words).split(": ")[0]
    return _cell(words.rstrip(".:"))


PUBLIC_PACKAGES = (
    "gym_fed",
    "gym_fed.quickstart",
    "gym_fed.data",
    "gym_fed.evaluation",
    "gym_fed.quantization",
    "gym_fed.personalization",
    "gym_fed.registry",
    "gym_server.strategy",
)
"""Packages with public names; other names may change with any version."""

_API_INTRODUCTION = """\
# The Python API

These names are meant to be imported. Others may change with any version. A package loads nothing heavy until a name is
used. Examples: [recipes](recipes.md), [variants](variants.md), [evaluation](evaluation.md),
[quantisation](quantization.md), [the registry](registry.md).
"""


def api_page() -> str:
    """Return a table of the names of each package, followed by mkdocstrings directives."""
    parts = [_API_INTRODUCTION]
    for package in PUBLIC_PACKAGES:
        module = importlib.import_module(package)
        names = _public_names(module)
        rows = "".join(f"| `{name}` | {_doc_summary(getattr(module, name))} |\n" for name in names)
        places = "".join(f"::: {package}.{name}\n\n" for name in names)
        parts.append(f"## `{package}`\n\n| name | is |\n|---|---|\n{rows}\n{places}")
    return "\n".join(parts)


def _public_names(module: ModuleType) -> list[str]:
    """Return the functions and classes that a package exports or a module defines."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]
    return sorted(name for name in names if callable(getattr(module, name)))


def _doc_summary(value: Any) -> str:
    return _cell(" ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()))


_PLACES = ("Python", "command", "YAML")
_ALIASES_INTRODUCTION = """\
# Aliases

Names from other projects: those that work unchanged, those that are refused, and those for which the error names
gym-fed's equivalent. How they work: [names from other tools](names.md).
"""


def aliases_page() -> str:
    """Return a table for each place where a name is written, then the refused names and those named only in errors."""
    from gym_fed.interop.words import NEAR, NEAR_MEMBERS, rows

    known = list(rows())
    parts = [_ALIASES_INTRODUCTION]
    parts += [
        _alias_table(f"## {where}", [r for r in known if r.where == where and not r.refused])
        for where in _PLACES
    ]
    parts.append(_alias_table("## Refused", [row for row in known if row.refused]))
    parts.append("## Named in the error\n\n| other tools | gym-fed |\n|---|---|")
    near = [(theirs, ours) for theirs, ours in sorted(NEAR["TrainingConfig"].items())]
    near += [
        (f"{kind} {theirs}", ours) for kind, names in NEAR_MEMBERS.items() for theirs, ours in names.items()
    ]
    parts[-1] += "".join(f"\n| `{theirs}` | `{ours}` |" for theirs, ours in near) + "\n"
    return "\n".join(parts)


def _alias_table(title: str, words: list[Alias]) -> str:
    lines = [f"{title}\n", "| other tools | gym-fed |", "|---|---|"]
    for row in words:
        instead = "".join(f"<br>`{line}`" for line in row.instead)
        lines.append(f"| `{_cell(row.theirs)}` | {_cell(row.ours)}{_cell(instead)} |")
    return "\n".join(lines) + "\n"


_KEY_OF_KIND = {"tuning method": "finetuning", "export format": "--format"}
"""Config keys and options of registries whose name differs from the key."""

_FACTS = {
    "algorithm": {
        "needs_graders": "`graders`",
        "forgets": "`role: forget`",
        "packs": "`packing: bfd`",
        "per_example": "`privacy`",
        "shards": "`fsdp2`, `tensor_parallel`",
        "splits_rows": "`sequence_parallel`",
        "reads_images": "images, audio, video",
        "federates": "federated rounds",
    },
    "tuning method": {
        "on_quantized": "`quantization`",
        "per_example": "`privacy`",
        "federates": "federated rounds",
    },
    "optimizer": {"shards": "`fsdp2`, `tensor_parallel`, `pipeline_parallel`", "per_example": "`privacy`"},
    "feature": {"per_example": "`privacy`"},
}
"""Boolean attributes of members by kind, with the key or feature that each allows."""

_MEMBERS_INTRODUCTION = """\
# Every name that a config may hold

What each name means, what it can be combined with, and what it was tested with, on a CPU and with tiny models. Names
that an installed package adds are not listed. Hardware and libraries: [what runs where](support.md).
"""


def members_page() -> str:
    """Return a table for each kind of member."""
    from gym_fed.core.registries import ALL

    return "\n".join([_MEMBERS_INTRODUCTION, *(_member_table(kind) for kind in ALL)])


def _member_table(kind: Any) -> str:
    rows = [_member_row(kind, name) for name in kind.own()]
    used = [column for column in rows[0] if any(row[column] for row in rows)]
    head = [f"`{_KEY_OF_KIND.get(kind.kind, kind.kind)}`" if column == "name" else column for column in used]
    lines = [head, ["---"] * len(head), *([row[column] for column in used] for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _member_row(kind: Any, name: str) -> dict[str, str]:
    member = kind.new(name) if hasattr(kind, "table") else kind.type_of(name)
    facts = _FACTS.get(kind.kind, {})
    return {
        "name": f"`{name}`",
        "what it is": _first_line(member),
        "rows": getattr(member, "row_kind", ""),
        "goes with": ", ".join(words for fact, words in facts.items() if getattr(member, fact)),
        "runs on": _hardware(member) if kind.kind == "optimizer" else "",
        "tried on a CPU": getattr(member, "tried", ""),
        "not tried": getattr(member, "untried", ""),
    }


def _hardware(optimizer: Any) -> str:
    return f"CUDA: {optimizer.gpu}" if getattr(optimizer, "gpu", "") else "anywhere"


def _first_line(member: Any) -> str:
    """Return the first line of the member's module; for an entry of a table its summary or its class."""
    if not isinstance(member, type) and type(member).__module__.rpartition(".")[2].startswith(("_", "base")):
        return _cell(getattr(member, "summary", "") or f"`{member.source.replace(':', '.')}`")
    module = inspect.getmodule(member if isinstance(member, type) else type(member))
    return _cell(" ".join((getattr(module, "__doc__", None) or "").split("\n\n")[0].split()))


def _cell(text: str) -> str:
    """Format a text as a cell of a Markdown table."""
    return re.sub(r"``(.+?)``", r"`\1`", text).replace("|", "\\|")


METRIC_TABLES = {
    "The hub": ("gym_server.observe.metrics", "gym_server.observe.instruments"),
    "The API": ("gym_fed.serving.http.metrics",),
    "A contributor's agent": ("gym_client.observe.metrics",),
}
"""The headings of the page, with the modules whose ``ROWS`` each lists."""
_METRICS_INTRODUCTION = """\
# Every metric

What each metric of a hub, an API server and an agent measures, with its labels. Servers also export the
`process_*` metrics of Prometheus' client library. Where to read them, and what to do on an
alert: [observe](observe.md).
"""


def metrics_page() -> str:
    """Return a table of metrics for each program."""
    parts = [_METRICS_INTRODUCTION]
    for title, modules in METRIC_TABLES.items():
        rows = [row for module in modules for row in importlib.import_module(module).ROWS]
        lines = [f"## {title}\n", "| metric | type | labels | |", "|---|---|---|---|"]
        lines += [
            f"| `{row.series}` | {row.kind} | {', '.join(row.labels)} | {_cell(row.description)} |"
            for row in rows
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


_PACKAGE = Path(__file__).parents[1]
_PAGES = (_PACKAGE / "assets" / "docs", _PACKAGE.parent / "docs")
_SITES = (_PACKAGE / "assets" / "site", _PACKAGE.parent / "build" / "site")
"""Folders of the site in an installed package and in a checkout; they exist only if MkDocs was installed at build time.
"""


def docs(
    page: Annotated[
        str, typer.Argument(help="A page: train, quickstart, glossary, decisions/README, ...")
    ] = "index",
    print_page: Annotated[bool, typer.Option("--print", help="Print the page to the terminal.")] = False,
    open_page: Annotated[
        bool | None, typer.Option("--open/--no-open", help="Open the browser; the default on a terminal.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Open the guides of this version, or print one in the terminal; no network is used.

    The reference pages config, api, aliases, members and metrics are built from the code. They are
    printed if there is no site.
    """
    name = _page_name(page)
    html = re.sub(r"/README$", "/index", name) + ".html"  # MkDocs' name for the first page of a folder
    file = next((folder / html for folder in _SITES if (folder / html).is_file()), None)
    source = None if name in BUILT_PAGES else _folder() / f"{name}.md"
    url = shown.resolve().as_uri() if (shown := file or source) else None
    if as_json:
        print_result(True, {"page": name, "url": url, "file": str(source) if source else None})
    elif print_page or url is None:
        _print(
            source.read_text(encoding="utf-8") if source else re.sub(r"(?m)^::: .+\n\n", "", built_page(name))
        )
    else:
        out.print(url)
        if open_page or (open_page is None and out.is_terminal):
            import webbrowser

            webbrowser.open(url)


def _page_name(page: str) -> str:
    """Return the page's path below docs/ without its suffix."""
    folder = _folder()
    names = sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.md"))
    names += BUILT_PAGES
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "gym docs --print lists all pages"
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"there is no page {page!r}", hint)
    return name


def _folder() -> Path:
    folder = next((folder for folder in _PAGES if folder.is_dir()), None)
    if folder is None:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no guides in {_PAGES[0]}", "reinstall gym-fed")
    return folder


def _print(text: str) -> None:
    if not out.is_terminal:
        typer.echo(text, nl=False)
        return
    from rich.markdown import Markdown

    out.print(Markdown(text, hyperlinks=False), soft_wrap=False)
