"""Recipes: Python training scripts with a context that provides devices, a tracker, models and storage.

See docs/recipes.md for an example. If a config suffices, use ``gym train``.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gym_fed.base.models import LoadedModel, load_model, pick_device
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import fsync_folder, fsync_tree

if TYPE_CHECKING:
    import torch

Role = Literal["policy", "reference", "value"]


class Tracks(Protocol):
    """The interface of an experiment tracker, which ``gym_fed.Experiment`` implements."""

    def log_config(self, config: Mapping[str, Any]) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_artifacts(self, paths: Sequence[str | Path]) -> None: ...


class RecipeContext:
    """The context of a recipe: devices, tracker, models and storage.

    ::

        with RecipeContext("runs/mine", seed=1) as context:
            policy = context.spawn("policy", model="gym-nano")
            context.track({"reward": 0.5}, step=1)
            context.save_safely("policy", policy)

    Args:
        output_dir: Folder of the recipe; created if missing, otherwise reused.
        devices: Names of devices; ``auto`` selects all CUDA GPUs, otherwise MPS, otherwise the CPU.
        seed: Seed for Python, numpy and torch, which is set when the block is entered.
        experiment: A tracker, which is left open; by default, a ``gym_fed.Experiment`` in ``output_dir``, which is
            closed at the end.

    Attributes:
        output_dir: The folder of the recipe.
        devices: The ``torch.device`` objects to compute on; the first one is the default for ``spawn``.
        experiment: The tracker.
        storage: The folder to which ``save_safely`` writes.

    Raises:
        GymError: ``USAGE`` for a device that is unknown or not available.
    """

    def __init__(
        self,
        output_dir: str | Path,
        devices: str | Sequence[str] = "auto",
        seed: int = 0,
        experiment: Tracks | None = None,
    ) -> None:
        self.output_dir = Path(output_dir)
        self.devices = _devices(devices)
        self.seed = seed
        self.storage = self.output_dir / "storage"
        self._own = experiment is None
        if experiment is None:
            from gym_fed.tracking.experiment import Experiment

            experiment = Experiment(self.output_dir)
        self.experiment: Tracks = experiment

    def __enter__(self) -> RecipeContext:
        from transformers import set_seed

        self.storage.mkdir(parents=True, exist_ok=True)
        set_seed(self.seed)
        self.experiment.log_config({"seed": self.seed, "devices": [str(device) for device in self.devices]})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own:
            self.experiment.close()  # type: ignore[attr-defined]  # our own can be closed

    def track(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of one step. Steps are counted from 1."""
        self.experiment.log_metrics(metrics, step)

    @property
    def world_size(self) -> int:
        """The number of processes that share the recipe; 1 unless torchrun started it."""
        from gym_fed.training.processes.ranks import world_size

        return world_size()

    def spawn_train(
        self,
        model: str | LoadedModel,
        *,
        tp: int = 1,
        device: str | torch.device | None = None,
        dtype: str = "float32",
    ) -> LoadedModel:
        """Create a model to be trained: ``spawn_train("policy", model)``.

        Args:
            model: See ``spawn``.
            tp: Number of processes that share the model's layers; only 1 is supported.
            device: See ``spawn``.
            dtype: See ``spawn``.

        Raises:
            GymError: ``USAGE`` for a ``tp`` other than 1; see ``spawn``.
        """
        if tp != 1:
            reason = f"spawn_train: tp is {tp}, but a recipe does not shard models (world_size is {self.world_size})"
            remedy = (
                "use gym train --nproc with distributed: {strategy: tensor_parallel}, which splits the layers"
            )
            raise GymError(ErrorCode.USAGE, reason, remedy)
        return self.spawn("policy", model, device=device, dtype=dtype)

    def spawn(
        self,
        role: Role,
        model: str | LoadedModel,
        *,
        device: str | torch.device | None = None,
        dtype: str = "float32",
    ) -> LoadedModel:
        """Create a model for a role. Its source is not changed.

        ========== =============================================================================================
        policy     trained: a causal LM with all weights trainable; with an adapter, only the adapter's
        reference  the same, frozen
        value      trained: PPO's ``Critic``, the body with a zero-initialised scalar head per token;
                   ``model(input_ids, attention_mask, num_tokens)``
        ========== =============================================================================================

        Args:
            role: See above.
            model: A name as for ``load_model``, or a spawned model, which is then copied.
            device: By default, the first of ``devices``.
            dtype: Dtype of the weights if the model is loaded.

        Raises:
            GymError: ``USAGE`` for an unknown role; errors from ``load_model``.
        """
        import copy

        if role not in ("policy", "reference", "value"):
            raise GymError(ErrorCode.USAGE, f"spawn: unknown role {role!r}", "use policy, reference or value")
        target = pick_device(str(device)) if device is not None else self.devices[0]
        if isinstance(model, str):
            spawned = load_model(model, dtype=dtype)
        else:
            spawned = LoadedModel(copy.deepcopy(model.model), copy.deepcopy(model.tokenizer), model.name)
        if role == "value":
            from gym_fed.training.model.critic import critic_like

            spawned.model = critic_like(spawned.model, train_body=True)
        elif role == "reference":
            spawned.model.requires_grad_(False)
        elif hasattr(spawned.model, "peft_config"):
            for name, weights in spawned.model.named_parameters():
                weights.requires_grad_(spawned.model.active_adapter in name.split("."))
        else:
            spawned.model.requires_grad_(True)
        spawned.model = spawned.model.to(target).eval()
        return spawned

    def save_safely(self, name: str, what: Any) -> Path:
        """Write to ``storage`` under ``name``, or else ``NAME-2``, ``NAME-3``, ...; nothing is overwritten.

        The write is atomic. If the process is killed, a hidden ``.NAME.*.partial`` may remain.

        Args:
            name: Name of the new file or folder; must not be a path.
            what: Bytes or text, for a file; a mapping of tensors, for a safetensors file; a spawned model or any object
                with ``save_pretrained``, for a folder.

        Returns:
            The path that was written.

        Raises:
            GymError: ``USAGE`` for an invalid name or an object that cannot be saved.
        """
        if not name or name != Path(name).name or name.startswith(".") or "\0" in name:
            reason = f"save_safely: {name!r} is not a valid file name"
            raise GymError(ErrorCode.USAGE, reason, "use a name without slashes or a leading dot")
        write = _writer(what)
        self.storage.mkdir(parents=True, exist_ok=True)
        part = self.storage / f".{name}.{secrets.token_hex(8)}.partial"
        try:
            write(part)
            fsync_tree(part)
            place = _claim(part, self.storage / name)
        finally:
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink(missing_ok=True)
        fsync_folder(self.storage)
        self.experiment.log_artifacts([place])
        return place

    def save_model_safely(self, name: str, model: LoadedModel) -> Path:
        """Save a model with its tokenizer, as in ``save_safely``.

        Raises:
            GymError: ``USAGE`` for an object that is not a spawned model.
        """
        if not isinstance(model, LoadedModel):
            reason = f"save_model_safely: {type(model).__name__} is not a model that spawn created"
            remedy = "pass the result of spawn, or write other objects with save_safely"
            raise GymError(ErrorCode.USAGE, reason, remedy)
        return self.save_safely(name, model)


def _devices(devices: str | Sequence[str]) -> list[torch.device]:
    import torch

    if devices == "auto" and torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    names = [devices] if isinstance(devices, str) else list(devices)
    if not names:
        raise GymError(ErrorCode.USAGE, "devices: the list is empty", "use auto, or a device such as cpu")
    return [pick_device(name) for name in names]


def _writer(what: Any) -> Callable[[Path], Any]:
    """Return a function that writes ``what`` to a new path."""
    if isinstance(what, str):
        return lambda path: path.write_text(what, encoding="utf-8")
    if isinstance(what, bytes | bytearray | memoryview):
        return lambda path: path.write_bytes(what)
    if isinstance(what, Mapping):
        from safetensors.torch import save_file

        return lambda path: save_file({key: value.contiguous() for key, value in what.items()}, path)
    parts = [what.model, what.tokenizer] if isinstance(what, LoadedModel) else [what]
    if not all(hasattr(part, "save_pretrained") for part in parts):
        reason = f"save_safely cannot write {type(what).__name__}"
        raise GymError(ErrorCode.USAGE, reason, "pass bytes, text, a mapping of tensors, or a model")

    def write(path: Path) -> None:
        path.mkdir()
        for part in parts:
            options = {"save_embedding_layers": False} if hasattr(part, "peft_config") else {}
            part.save_pretrained(path, **options)

    return write


def _claim(part: Path, path: Path) -> Path:
    """Rename the written part to the first free name; other processes may claim names concurrently."""
    number, target = 1, path
    while True:
        try:
            if not part.is_dir():
                os.link(part, target)
                return target
            if not target.exists():
                return part.rename(target)  # fails if the target is a non-empty folder
        except OSError:
            if not target.exists():
                raise
        number += 1
        target = path.with_name(f"{path.stem}-{number}{path.suffix}")
