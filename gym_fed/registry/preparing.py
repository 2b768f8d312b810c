"""Prepare a version of a model: its files, card, evaluation records, and facts stated by the user."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from gym_fed.config.schema.base import first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.core.text import plain
from gym_fed.data.registry import checked_licence
from gym_fed.registry.card.facts import EVALS, lineage_of, published_record, read_evaluations
from gym_fed.registry.card.readme import card_of
from gym_fed.registry.contents import Contents, contents_of, saved
from gym_fed.registry.manifest import CARD, NOT_STATED, BaseUsed, DataUsed, ModelFile, ModelManifest, Parent
from gym_fed.registry.versions import require_name

CONFIG_FILE = "config.yaml"

Note = Callable[[str], None]
"""Called with a line to print."""


@dataclass(frozen=True)
class StatedFacts:
    """Facts that the user states about a model, in addition to its files and records.

    Attributes:
        licence: An SPDX identifier.
        description: A few lines.
        base: The name or folder of the base of an adapter or a delta, if it cannot be found by the name in it.
        parents: Versions that the model was derived from.
        data: Rows that the model was trained on, in addition to those in the run's record.
        evaluations: Records of ``gym eval``, or folders, from which those of this model are taken.
    """

    licence: str = NOT_STATED
    description: str = ""
    base: str | None = None
    parents: Sequence[Parent] = ()
    data: Sequence[DataUsed] = ()
    evaluations: Sequence[Path] = ()


@dataclass(frozen=True)
class PreparedModel:
    """A model that is ready to be published, or written as a folder.

    Attributes:
        draft: The manifest, without the number and the digests and sizes of files.
        files: Local files by their path in the model; they exist until the block of ``prepared`` ends.
    """

    draft: ModelManifest
    files: Mapping[str, Path]


@contextmanager
def prepared(
    name: str,
    model: Any,
    stated: StatedFacts,
    *,
    config: BaseModel | Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    known_base: Callable[[BaseUsed], BaseUsed] = lambda base: base,
    note: Note = lambda line: None,
) -> Iterator[PreparedModel]:
    """Read a model and its records, and write its card.

    Args:
        model: See ``ModelRegistry.push``.
        stated: Facts stated by the user.
        config: Config of a model in memory, which is stored next to it.
        tokenizer: The tokenizer of a model in memory.
        known_base: Function that adds the registry's facts to a base.
        note: Called with the names of omitted files.

    Raises:
        GymError: See ``ModelRegistry.push``.
    """
    require_name(name)
    licence = checked_licence(stated.licence)
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        is_path = isinstance(model, str | Path)
        path = (
            Path(model).expanduser()
            if is_path
            else saved(name, model, tokenizer, _new_folder(scratch / "model"))
        )
        contents = contents_of(path, _new_folder(scratch / "changed"), stated.base)
        if config is not None and not is_path:
            _write_config(scratch / CONFIG_FILE, config)
            contents.files[CONFIG_FILE] = scratch / CONFIG_FILE
        if is_path and contents.left_out:
            note(f"not pushed: {plain(', '.join(contents.left_out), 500)}")
        if contents.base is not None and contents.base.digest is not None:
            contents.base = known_base(contents.base)
        figures, records = read_evaluations(stated.evaluations, contents.identities)
        for record in records:
            copy = scratch / "evals" / record.name
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(published_record(record, name))
            contents.files[f"{EVALS}/{record.name}"] = copy
        lineage = lineage_of(contents.folder, path if contents.kind == "delta" else None)
        changes = {"parents": list(stated.parents), "data": [*lineage.data, *stated.data]}
        draft = _draft(path, name, contents, licence, stated.description, lineage.model_copy(update=changes))
        write_atomically(scratch / CARD, card_of(draft, figures, contents.folder).encode("utf-8"))
        yield PreparedModel(draft, {**contents.files, CARD: scratch / CARD})


def _draft(
    path: Path, name: str, contents: Contents, licence: str, description: str, lineage: Any
) -> ModelManifest:
    try:
        return ModelManifest(
            name=name,
            version=1,
            kind=contents.kind,
            digest=contents.digest,
            licence=licence,
            description=description,
            base=contents.base,
            files=[
                ModelFile(path=file, sha256="0" * 64, num_bytes=0) for file in sorted({CARD, *contents.files})
            ],
            lineage=lineage.model_dump(),
            created_at=int(time.time()),
        )
    except ValidationError as error:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{path} cannot be published: {plain(first_problem(error), 300)}",
            "shorten or rename the field that the message names",
        ) from error


def _write_config(file: Path, config: BaseModel | Mapping[str, Any]) -> None:
    """Write a config as YAML."""
    import yaml

    from gym_fed.config.yaml.file import dump_yaml

    if isinstance(config, BaseModel):
        text = dump_yaml(config)
    else:
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    write_atomically(file, text.encode())


def _new_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder
