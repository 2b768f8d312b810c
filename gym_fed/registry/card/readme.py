"""The ``README.md`` of a model: YAML for the Hub, then a text for readers.

Its texts (names, descriptions, evaluation results) are untrusted. A YAML library writes the YAML. In the body, each
text is one line without control characters, in which Markdown and HTML are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from gym_fed.core.text import counted, plain
from gym_fed.registry.card.facts import MAX_SHOWN, CardFigure, contributors_in, environment, result
from gym_fed.registry.manifest import NOT_STATED, ModelManifest
from gym_fed.version import __version__

UNKNOWN = "not stated"

_HUB_LICENCES = {
    name: name.lower()
    for name in (
        *(
            "Apache-2.0",
            "BSD-2-Clause",
            "BSD-3-Clause",
            "CC-BY-2.0",
            "CC-BY-3.0",
            "CC-BY-4.0",
            "CC-BY-NC-2.0",
        ),
        *("CC-BY-NC-3.0", "CC-BY-NC-4.0", "CC-BY-NC-ND-4.0", "CC-BY-NC-SA-3.0", "CC-BY-NC-SA-4.0"),
        *("CC-BY-ND-4.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0", "CC0-1.0", "CDLA-Permissive-1.0"),
        *("CDLA-Permissive-2.0", "CDLA-Sharing-1.0", "ECL-2.0", "EUPL-1.2", "ISC", "MIT", "MPL-2.0"),
        *("Unlicense", "etalab-2.0"),
    )
} | {
    "C-UDA-1.0": "c-uda",
    "GPL-2.0-only": "gpl-2.0",
    "GPL-2.0-or-later": "gpl-2.0",
    "GPL-3.0-only": "gpl-3.0",
    "GPL-3.0-or-later": "gpl-3.0",
    "LGPL-3.0-or-later": "lgpl-3.0",
    "ODC-By-1.0": "odc-by",
    "ODbL-1.0": "odbl",
    "PDDL-1.0": "pddl",
}
"""The Hub's name of a licence, by SPDX identifier."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_MARKDOWN = re.compile(
    r"([\\`*_{}\[\]|~<>&$@!]|:(?=//)|(?<=www)\.|^[#+=-]|(?<=^\d)[.)]|(?<=^\d\d)[.)])", re.IGNORECASE
)
_RELATIONS = {"adapter": "adapter", "delta": "finetune", "weights": "finetune"}


def spdx(name: str) -> str:
    """Return the SPDX name of a licence on the Hub; any other name unchanged."""
    names = (ours for ours, hub in _HUB_LICENCES.items() if name.lower() in (hub, ours.lower()))
    return next(names, name)


def card_of(
    manifest: ModelManifest,
    figures: Sequence[CardFigure],
    folder: Path | None = None,
    *,
    library: str | None = None,
    relation: str | None = None,
) -> str:
    """Write the text of the card.

    Args:
        manifest: The manifest of the version; its number and its files are not in the card.
        figures: Evaluation results of the version.
        folder: The folder with the records of its run.
        library: The Hub's name of the library that loads it; by default transformers or PEFT.
        relation: The relation to the base in the Hub's terms; by default adapter or finetune.
    """
    values = front_matter(manifest, figures)
    if library is not None:
        values["library_name"] = library
    if relation is not None and "base_model" in values:
        values["base_model_relation"] = relation
    head = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
    sections = [
        f"# {_md(manifest.name)}",
        _md(manifest.description, 2000) or "No description was given.",
        _identity(manifest),
        _data(manifest),
        _training(folder, manifest),
        *_contributors(folder),
        _evaluation(figures),
        _licences(manifest),
        f"Written by gym-fed {__version__} from the run's record. Facts that it lacks are marked as {UNKNOWN}.",
    ]
    return f"---\n{head}---\n\n" + "\n\n".join(sections) + "\n"


def front_matter(manifest: ModelManifest, figures: Sequence[CardFigure]) -> dict[str, Any]:
    """Return the metadata of the card under the Hub's names."""
    metadata: dict[str, Any] = {"license": _HUB_LICENCES.get(manifest.licence, "other")}
    if manifest.licence == NOT_STATED:
        metadata["license"] = "unknown"
    elif metadata["license"] == "other":
        metadata["license_name"] = plain(manifest.licence)
    metadata["library_name"] = "peft" if manifest.kind == "adapter" else "transformers"
    metadata["pipeline_tag"] = "text-generation"
    if manifest.base is not None and is_name_of_the_hub(manifest.base.name):
        metadata["base_model"] = manifest.base.name
        metadata["base_model_relation"] = _RELATIONS[manifest.kind]
    hubs = [
        item.hub for item in manifest.lineage.data if item.hub is not None and is_name_of_the_hub(item.hub)
    ]
    if hubs:
        metadata["datasets"] = list(dict.fromkeys(hubs))
    metadata["tags"] = ["gym-fed", manifest.kind]
    if figures:
        metadata["model-index"] = [
            {"name": plain(manifest.name), "results": [_index(item) for item in figures]}
        ]
    return metadata


def is_name_of_the_hub(text: str) -> bool:
    """Return True for a valid repository name of the Hub, ``OWNER/NAME``."""
    return _HUB_NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


def _index(figure: CardFigure) -> dict[str, Any]:
    metric: dict[str, Any] = {
        "type": plain(figure.metric, 100),
        "value": figure.value,
        "name": plain(f"{figure.metric}{_samples(figure)}", 200),
    }
    task = plain(figure.task, 100)
    return {"task": {"type": "text-generation"}, "dataset": {"name": task, "type": task}, "metrics": [metric]}


def _samples(figure: CardFigure) -> str:
    return "" if figure.num_samples is None else f" on {counted(figure.num_samples, 'row')}"


def _identity(manifest: ModelManifest) -> str:
    kinds = {
        "weights": "full weights",
        "adapter": "a PEFT adapter",
        "delta": "a delta on its base, `model.gymdelta`; weights next to it are the sum of both",
    }[manifest.kind]
    base, lineage = manifest.base, manifest.lineage
    rows = [("Kind", kinds)]
    if manifest.digest is not None:
        rows.append(("Digest of the tensors", f"`{manifest.digest}`"))
    rows.append(("Base", UNKNOWN if base is None else _md(base.name)))
    if base is not None:
        rows.append(("Digest of the base", UNKNOWN if base.digest is None else f"`{base.digest}`"))
        if base.version is not None:
            rows.append(("Base in the registry", _md(base.version)))
    rows += [("Made from", f"{_md(parent.version)} (`{parent.sha256}`)") for parent in lineage.parents]
    if lineage.global_version is not None:
        rows.append(("Global version of a hub", f"`{lineage.global_version}`"))
    if lineage.soups:
        rows.append(("Soups in it", f"{len(lineage.soups)}, the newest `{lineage.soups[-1]}`"))
    return "## What it is\n\n" + _table(("", ""), rows)


def _data(manifest: ModelManifest) -> str:
    lineage = manifest.lineage
    if not lineage.data:
        return f"## Data\n\n{UNKNOWN.capitalize()}."
    rows = [(_md(data.name), _md(data.licence) if data.licence else UNKNOWN) for data in lineage.data]
    text = "## Data\n\n" + _table(("rows", "licence"), rows)
    if lineage.data_sha256 is not None:
        text += f"\n\nDigest of all rows: `{lineage.data_sha256}`."
    return text


def _training(folder: Path | None, manifest: ModelManifest) -> str:
    rows = [("Method", _md(manifest.lineage.method) or UNKNOWN)]
    if manifest.lineage.config_sha256 is not None:
        rows.append(("Digest of the config", f"`{manifest.lineage.config_sha256}`"))
    facts = environment(folder) if folder is not None else {}
    ended = result(folder) if folder is not None else {}
    for key, name in (
        ("steps", "Steps"),
        ("num_examples", "Examples"),
        ("num_tokens", "Tokens"),
        ("final_loss", "Loss at the end"),
    ):
        value = ended.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            rows.append((name, f"{value:.6g}" if isinstance(value, float) else f"{value:,}"))
    for key, name in (("seed", "Seed"), ("cpu", "CPU"), ("platform", "Platform"), ("python", "Python")):
        if isinstance(facts.get(key), str | int):
            rows.append((name, _md(facts[key])))
    packages = facts.get("packages")
    if isinstance(packages, dict):
        shown = ", ".join(f"{name} {version}" for name, version in sorted(packages.items())[:20])
        rows.append(("Packages", _md(shown, 1000)))
    return "## Training\n\n" + _table(("", ""), rows)


def _contributors(folder: Path | None) -> list[str]:
    contributors = contributors_in(folder) if folder is not None else []
    if not contributors:
        return []
    rows = [
        (
            _md(contributor.name) if contributor.name else f"`{_md(contributor.contributor, 64)}`",
            f"{contributor.share:.1%}",
        )
        for contributor in contributors[:MAX_SHOWN]
    ]
    left = len(contributors) - len(rows)
    more = f"\n\n{counted(left, 'contributor')} more." if left else ""
    text = "Shares are proportional to the credits of the rounds. Only contributors who consented are named."
    return ["## Contributors\n\n" + text + "\n\n" + _table(("contributor", "share"), rows) + more]


def _evaluation(figures: Sequence[CardFigure]) -> str:
    if not figures:
        return f"## Evaluation\n\n{UNKNOWN.capitalize()}: no evaluation record was published with it."
    rows = []
    for figure in figures:
        error = UNKNOWN if figure.stderr is None else f"{figure.stderr:.2g}"
        rows.append(
            (
                _md(figure.task),
                _md(figure.metric),
                f"{figure.value:.6g}",
                error,
                UNKNOWN if figure.num_samples is None else f"{figure.num_samples:,}",
                _md(figure.engine),
            )
        )
    head = ("task", "metric", "value", "standard error", "rows", "measured by")
    return "## Evaluation\n\nSelf-reported.\n\n" + _table(head, rows)


def _licences(manifest: ModelManifest) -> str:
    own = UNKNOWN if manifest.licence == NOT_STATED else _md(manifest.licence)
    text = f"## Licence\n\nModel: {own}."
    if manifest.base is not None:
        of_base = manifest.base.licence
        text += f" Base: {UNKNOWN if of_base == NOT_STATED else _md(of_base)}."
    problems = conflicts(manifest)
    if problems:
        text += "\n\nCheck before you redistribute it:\n\n" + "\n".join(
            f"- {_md(problem, 500)}" for problem in problems
        )
    return text


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _md(text: object, limit: int = 300) -> str:
    """Escape a text for Markdown, so that nothing in it is markup, a link or a tag."""
    return _MARKDOWN.sub(r"\\\1", plain(str(text).strip(), limit))


_NON_COMMERCIAL = re.compile(r"-nc\b|-nc-|non-?commercial", re.IGNORECASE)
_NO_DERIVATIVES = re.compile(r"-nd\b|-nd-", re.IGNORECASE)
_SHARE_ALIKE = re.compile(r"-sa-|-sa\b|^a?gpl|^lgpl|^odbl|^eupl|sharing", re.IGNORECASE)


def conflicts(manifest: ModelManifest) -> list[str]:
    """Return a sentence for each conflict of the licences of model, base and data; empty if none is known.

    This is not legal advice. It quotes the terms of the licences so that a person can decide. Whether the licence of
    training data applies to the trained model differs between countries.
    """
    problems = []
    own = manifest.licence
    for part_name, licence in _parts(manifest):
        if licence is None or licence == NOT_STATED:
            problems.append(
                f"{part_name}: licence not stated, so it is unknown whether the model may be redistributed"
            )
            continue
        parts = re.split(r"\s+(?:AND|OR)\s+", licence)
        if any(_NO_DERIVATIVES.search(part) for part in parts):
            problems.append(f"{part_name}: {licence} allows no derivatives")
        if any(_NON_COMMERCIAL.search(part) for part in parts) and not _NON_COMMERCIAL.search(own):
            problems.append(
                f"{part_name}: {licence} forbids commercial use, but the model's licence {_licence_text(own)} does not"
            )
        if any(_SHARE_ALIKE.search(part) for part in parts) and own.lower() != licence.lower():
            problems.append(
                f"{part_name}: {licence} requires the same licence for derived works, but the model's is "
                f"{_licence_text(own)}"
            )
    if own == NOT_STATED:
        problems.append("the model's own licence is not stated: nobody may use it")
    return problems


def _parts(manifest: ModelManifest) -> Iterator[tuple[str, str | None]]:
    if manifest.base is not None:
        yield f"base {manifest.base.name}", manifest.base.licence
    for data in manifest.lineage.data:
        yield f"data {data.name}", data.licence


def _licence_text(licence: str) -> str:
    return "not stated" if licence == NOT_STATED else licence
