"""The registry of models: named, versioned folders on a store, verified on the way in and out.

A model's files are kept as a dataset's are, each named by its sha256, so that two versions share what they have in
common. The newest version is what a name alone means; no version is ever replaced.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gym_fed.data.registry import DatasetManifest, DatasetRegistry, Manifests
from gym_fed.errors import ErrorCode, GymError
from gym_fed.files import write_atomically
from gym_fed.other_words import on_class_too

NOT_STATED = "LicenseRef-not-stated"


def default_model_store() -> str:
    """``$GYM_MODELS``, else ``models`` in ``$GYM_HOME`` or ``~/.gym-fed``."""
    home = os.environ.get("GYM_HOME") or "~/.gym-fed"
    return os.environ.get("GYM_MODELS") or str((Path(home) / "models").expanduser())


class ModelRegistry:
    """Models on one store.

    Args:
        url: A folder, or an fsspec URL such as ``s3://bucket/models``; by default ``default_model_store()``.
    """

    def __init__(self, url: str | Path | None = None) -> None:
        self.url = str(default_model_store() if url is None else url)
        self._versions = DatasetRegistry(self.url, kind="models")

    @on_class_too
    def push(
        self,
        name: str,
        model: Any,
        config: BaseModel | Mapping[str, Any] | None = None,
        *,
        tokenizer: Any = None,
        licence: str = NOT_STATED,
        description: str = "",
    ) -> DatasetManifest:
        """Publish a model as the next version of ``name``.

        Args:
            name: Small letters, digits, dots and dashes, with at most one ``/``.
            model: A folder with a model (such as a run's), a ``TrainResult``, or anything with ``save_pretrained``.
            config: Kept beside it as ``config.yaml``, where the folder has none.
            tokenizer: Goes with a model in memory; a ``TrainResult`` has its own.
            licence: SPDX identifier.
            description: One line.

        Raises:
            GymError: ``USAGE`` for something that is no model; see ``DatasetRegistry.push``.
        """
        with tempfile.TemporaryDirectory() as scratch:
            folder = model if isinstance(model, str | Path) else _saved(name, model, tokenizer, Path(scratch))
            if not any((Path(folder) / file).is_file() for file in ("config.json", "adapter_config.json")):
                raise GymError(
                    ErrorCode.USAGE,
                    f"{folder}: no config.json or adapter_config.json",
                    "give the folder of a model",
                )
            if config is not None and not isinstance(model, str | Path):
                _write_config(Path(folder), config)
            return self._versions.push(name, folder, licence=licence, description=description)

    @on_class_too
    def pull(self, reference: str, dest: str | Path | None = None) -> Path:
        """Fetch ``name`` or ``name@version``; a stopped pull continues.

        Args:
            reference: What to fetch.
            dest: Its folder; by default one beside the store, or in ``~/.gym-fed`` for a store elsewhere.

        Returns:
            The folder, which every ``model`` of ours takes.

        Raises:
            GymError: See ``DatasetRegistry.pull``.
        """
        manifest = self._versions.show(reference)
        home = Path(os.environ.get("GYM_HOME") or "~/.gym-fed").expanduser()
        folder = (
            Path(dest)
            if dest is not None
            else home / "pulled" / "models" / manifest.name / str(manifest.version)
        )
        self._versions.pull(f"{manifest.name}@{manifest.version}", folder)
        return folder

    def list(self) -> Manifests:
        """The newest version of every model, by name."""
        return self._versions.list()


def _saved(name: str, model: Any, tokenizer: Any, folder: Path) -> Path:
    """A model in memory, written to ``folder``."""
    tokenizer = tokenizer or getattr(model, "tokenizer", None)
    weights = model if hasattr(model, "save_pretrained") else getattr(model, "model", None)
    if not hasattr(weights, "save_pretrained"):
        raise GymError(
            ErrorCode.USAGE,
            f"{name}: {type(model).__name__} is no model",
            "give a folder, the result of Trainer.train, or a model with save_pretrained",
        )
    from gym_fed.models import quiet_loading

    with quiet_loading():
        for part in (weights, *([tokenizer] if tokenizer is not None else [])):
            part.save_pretrained(str(folder))
    return folder


def _write_config(folder: Path, config: BaseModel | Mapping[str, Any]) -> None:
    import yaml

    from gym_fed.config.yaml.file import dump_yaml

    if isinstance(config, BaseModel):
        text = dump_yaml(config)
    else:
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    write_atomically(folder / "config.yaml", text.encode())
