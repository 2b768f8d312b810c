"""The current global version on this machine: the base plus all committed soups, kept between rounds.

Only the contributor may specify a path to the base. A hub can only specify a plain name. It is looked up in the local
cache of downloaded models, and only after the contributor has agreed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.config.hub.task import TaskSpec, first_summed
from gym_fed.config.schema.plugins import only_recorded
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.portable import give_back_memory

if TYPE_CHECKING:
    from torch import Tensor

    from gym_client.agent.version_sum import VersionSum
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.parked import ParkedTensors

NANO = "gym-nano"
_BETWEEN = "between"
"""Placeholder for the version's digest after an error, which forces a reload of the base."""
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
_REMEDY = "pass the folder of the federation's base with --base PATH"
_REMEDY_OF_NAMES = "if you know the federation's base, pass its folder with --base PATH"


_IDLE_SECONDS = 30.0
"""Idle time in seconds after which the tensors are moved from memory to disk."""


class GlobalModel:
    """The tensors of the global version, float32 on the CPU, and a model with them while a round needs one."""

    def __init__(self, source: str) -> None:
        """Load the base.

        Args:
            source: ``gym-nano``, a model folder, or a Hugging Face name in the local cache.

        Raises:
            GymError: ``MODEL_NOT_FOUND`` or ``MODEL_INVALID``.
        """
        from gym_fed.base.models import load_model
        from gym_fed.delta.base import BaseSpec

        try:
            loaded = load_model(source, dtype="float32", device="cpu")
        except GymError as error:
            if error.code is not ErrorCode.MODEL_NOT_FOUND:
                raise
            raise GymError(error.code, error.message, _REMEDY) from error
        self.source = source
        self._parked: ParkedTensors | None = None
        self._may_park = True
        self._model: Any = loaded.model
        self.tokenizer: Any = loaded.tokenizer
        self.base: BaseSpec = BaseSpec.of(self.model, source)
        self.tensors: dict[str, Tensor] = {}
        self._applied: list[str] = []
        self._take_tensors()

    @property
    def model(self) -> Any:
        """The model with the global version's tensors; loaded again after ``release``."""
        self._unpark()
        if self._model is None:
            from gym_fed.base.models import load_model

            self._model = load_model(self.source, dtype="float32", device="cpu").model
            self.restore()
        return self._model

    def release(self) -> None:
        """Free the model's memory until the next round; the tensors stay in memory until ``park``."""
        self._model = None
        self._may_park = True
        give_back_memory()

    def park(self, folder: Path) -> None:
        """Move the tensors to a file until the next round if the disk has room. Tried once after each round."""
        from gym_fed.delta.parked import ParkedTensors

        if self._may_park and self._parked is None and self._model is None and self.tensors:
            self._may_park = False
            self._parked = ParkedTensors.park(self.tensors, folder)
        if self._parked is not None and self.tensors:
            self.tensors = {}
            give_back_memory()

    def _unpark(self) -> None:
        """Read the tensors back into memory; reload the base if their file is unreadable."""
        parked, self._parked = self._parked, None
        if parked is None:
            return
        if (tensors := parked.tensors()) is None:
            self.reload()
        else:
            self.tensors = tensors

    def moments_bytes(self) -> int:
        """Return the size in bytes of the AdamW moments of all weights, as kept between rounds."""
        from gym_fed.training.run.kept_moments import BYTES_PER_WEIGHT

        return BYTES_PER_WEIGHT * sum(tensor.numel() for tensor in self.tensors.values())

    def require_base(self, digest: str, name: str) -> None:
        """Raise ``BASE_MISMATCH`` unless this model is the federation's base."""
        if self.base.digest != digest:
            raise self.mismatch(digest, name)

    def mismatch(self, digest: str, name: str) -> GymError:
        """Create the error for a model that is not the federation's base."""
        return GymError(
            ErrorCode.BASE_MISMATCH,
            f"the model {self.source!r} has digest {self.base.digest}, but "
            f"the federation's base {name!r} has {digest}",
            _REMEDY,
        )

    def version_spec(self, spec: TaskSpec) -> BaseSpec:
        """Return the base spec of deltas against the task's global version."""
        from gym_fed.delta.base import BaseSpec

        return BaseSpec(spec.base_model, spec.version_digest, self.base.shapes)

    def advance(self, spec: TaskSpec, path_of: Callable[[str], Path], sums: VersionSum) -> None:
        """Update model and tensors to the task's global version.

        Only new soups are applied; if they extend an integer sum, the base is reloaded first.

        Args:
            spec: The task, with the soups from the base to its version.
            path_of: Returns the file of a soup by its sha256.
            sums: The integer sum of the additive soups, on disk.

        Raises:
            GymError: ``BASE_MISMATCH`` if the base or a soup does not match; ``DELTA_INVALID``; ``MISSING_DEPENDENCY``
                for a soup encoded with a plug-in that the task does not record.
        """
        from gym_fed.delta.base import BaseSpec
        from gym_fed.delta.versions import apply_soups, is_within_sum, specs_of

        self._unpark()
        self.require_base(spec.base_digest, spec.base_model)
        wanted, summed = [soup.version_digest for soup in spec.soups], first_summed(spec.soups)
        if wanted == self._applied:
            self.restore()
            return
        at = len(self._applied)
        if wanted[:at] != self._applied or is_within_sum(spec.soups, at):
            self.reload()
            at = 0
        specs = specs_of(BaseSpec(spec.base_model, spec.base_digest, self.base.shapes), spec.soups)
        with only_recorded(spec.plugins, "the task"):
            total = sums.advance(spec.soups, specs, path_of) if summed < len(wanted) else None
            self._applied = [_BETWEEN]
            apply_soups(self.tensors, spec.soups[at:], specs[at], path_of, total)
        self._applied = wanted
        self.restore()

    def restore(self) -> None:
        """Restore the global version's weights in the model after training, complete or interrupted."""
        import torch

        _without_adapter(self.model)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.tensors[name])
                parameter.requires_grad_(True)

    def reload(self) -> None:
        """Reload the base from disk."""
        from gym_fed.base.models import load_model
        from gym_fed.delta.base import tensors_digest

        self._model = None  # free the model first, so that only one is in memory
        self._model = load_model(self.source, dtype="float32", device="cpu").model
        digest = tensors_digest(self._model)
        if digest != self.base.digest:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"the model {self.source!r} changed on disk: {digest}",
                "restore the model's files",
            )
        self._applied = []
        self._take_tensors()

    def _take_tensors(self) -> None:
        from gym_fed.delta.base import model_tensors

        self.tensors = {name: tensor.clone() for name, tensor in model_tensors(self.model).items()}


def _without_adapter(model: Any) -> None:
    """Remove the adapter layers that an interrupted training run has left."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())


_loaded: dict[str, GlobalModel] = {}


def global_model(source: str) -> GlobalModel:
    """Return the process-wide model for a source, loading it if needed. Only the latest source is kept in memory."""
    if source not in _loaded:
        _loaded.clear()
        _loaded[source] = GlobalModel(source)
    return _loaded[source]


def park_idle_model(folder: Path, after_seconds: float) -> None:
    """Park the process-wide model in ``folder`` if it has been idle for ``after_seconds``."""
    if after_seconds >= _IDLE_SECONDS:
        for model in _loaded.values():
            model.park(folder)


def keep_model(model: GlobalModel, source: str) -> None:
    """Register a loaded model as the process-wide model, under the folder that now contains its files.

    Libraries find the config by the name that the model was loaded from; PEFT does so when it saves an adapter.
    """
    model.source = model.model.name_or_path = model.model.config._name_or_path = source
    _loaded.clear()
    _loaded[source] = model


def base_source(given: str | None, named: str) -> str:
    """Return the source of the base: the contributor's choice, otherwise the hub's plain name.

    Args:
        given: Value of ``--model``, from this run or an earlier one.
        named: The hub's name for its base, from its status or a task.

    Raises:
        GymError: ``POLICY_REFUSED`` if the hub's name is a path, or a file or folder on this machine. No file is
            opened for this check.
    """
    if given is not None:
        return given
    if named == NANO:
        return named
    if not _PLAIN.fullmatch(named) or ".." in named:
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"the hub's base model is {named[:200]!r}, which is not a plain name",
            f"a hub may not choose a path on this machine; {_REMEDY_OF_NAMES}",
        )
    if os.path.lexists(named):
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"the hub's base model is {named!r}, but a local file or folder has the same name",
            f"a hub may not choose a folder on this machine; {_REMEDY_OF_NAMES}",
        )
    return named


def needs_a_look(given: str | None, named: str) -> bool:
    """Return True if only the hub named the base; reading a local copy then needs the contributor's consent."""
    return given is None and named != NANO
