"""The hub's global model, which is the base with the committed soups: loading, held-out losses, and export."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from sqlalchemy import select

from gym_fed.base.models import LoadedModel, load_model, quiet_loading, resolve
from gym_fed.config.hub.sections import GateConfig
from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.task import SoupReference, first_summed
from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest, read_object
from gym_fed.core.portable import give_back_memory
from gym_fed.core.text import plain
from gym_fed.data.generated import generate
from gym_fed.data.rows import as_kind, representative
from gym_fed.data.sources import SourceRows
from gym_fed.delta.base import BaseSpec, model_tensors, tensors_digest
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.delta.integer_sum import read_sum
from gym_fed.delta.kept import mapped_base, precise_dtype, share_kept
from gym_fed.delta.parked import ParkedTensors
from gym_fed.delta.versions import apply_soups, is_within_sum, specs_of
from gym_fed.evaluation.loss import (
    OnDone,
    RowLosses,
    half_losses,
    heldout_row_losses,
    ignore_progress,
    row_losses,
)
from gym_fed.evaluation.soup_game import SoupGame
from gym_server.state import HubState
from gym_server.store.objects import ObjectStore
from gym_server.store.tables import published

DTYPES = ("float32", "bfloat16", "float16")


class HubModel:
    """The global model at a chosen version; it stays in memory from its first use until ``release``.

    Args:
        base: Base model of the federation, whose digest the loaded model must have.
        source: Model id or folder to load the base from.
        store: Object store with the soups.
        gate: Config of the held-out set.
        folder: Folder against which relative paths in the config are resolved.
    """

    def __init__(
        self, base: BaseSpec, source: str, store: ObjectStore, gate: GateConfig, folder: Path
    ) -> None:
        self._base = base
        self._source = source
        self._store = store
        self._gate = gate
        self._memory: LoadedModel | None = load_model(source)
        found = tensors_digest(self._memory.model)
        if found != base.digest:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{source} has digest {found}, but the federation's base is {base.digest}",
            )
        self._folder = folder
        self._parked: ParkedTensors | None = None
        self._applied: list[SoupReference] = []
        self.digest = base.digest
        self._rows = (
            # preference pairs are measured by the loss on the chosen answer
            as_kind(
                coordinator_rows(gate.heldout, gate.format, gate.max_examples, folder, "heldout"),
                "supervised",
            )
            if gate.heldout
            else []
        )
        self._known_losses: tuple[str, RowLosses] | None = None

    @classmethod
    def of(cls, state: HubState, config: ServerConfig) -> HubModel:
        """Create the model of a hub, at version 0."""
        return cls(state.base, config.base_model, state.store, config.gate, state.folder)

    @property
    def has_gate(self) -> bool:
        return bool(self._rows)

    @property
    def max_length(self) -> int:
        """Maximum length of a row for measuring a loss, in tokens."""
        return self._gate.max_length

    @property
    def num_held_out(self) -> int:
        return len(self._rows)

    @property
    def spec(self) -> BaseSpec:
        """Return the spec against which updates and soups for the current version are checked."""
        return BaseSpec(self._base.model_name, self.digest, self._base.shapes)

    @property
    def model(self) -> Any:
        return self._loaded.model

    @property
    def tokenizer(self) -> Any:
        return self._loaded.tokenizer

    @cached_property
    def settings(self) -> str:
        """Return a digest of the settings, other than the base's tensors, that evaluations depend on."""
        from gym_fed.evaluation.scoring.models import settings_digest

        return settings_digest(self._loaded.model, self._loaded.tokenizer)

    def follow(self, soups: Sequence[SoupReference]) -> None:
        """Move to the version that results from ``soups``, from the current version if possible, else from the base.

        After an error, the version is unchanged and the model is rebuilt at its next use.
        """
        known = [soup.version_digest for soup in self._applied]
        wanted, at = [soup.version_digest for soup in soups], len(known)
        if wanted == known:
            return
        try:
            if wanted[:at] != known or is_within_sum(soups, at):
                at, self._memory, self._parked = 0, None, None  # one base in memory at a time
                self._memory = self._load_base()
            self._apply(self._loaded.model, soups, at)
        except BaseException:
            self._memory = None
            raise
        self._applied, self.digest = list(soups), wanted[-1] if wanted else self._base.digest

    def release(self) -> None:
        """Free the model's memory until its next use; measured losses are kept."""
        if self._memory is not None:
            if self._applied:  # otherwise it is the base, which is on disk anyway
                self._parked = ParkedTensors.park(model_tensors(self._memory.model), self._folder / "staging")
            self._memory = None
        give_back_memory()

    @contextmanager
    def freed_afterwards(self) -> Iterator[HubModel]:
        """Release the model at the end of the block, since the time between merges is much longer than a merge."""
        try:
            yield self
        finally:
            self.release()

    @property
    def _loaded(self) -> LoadedModel:
        """Return the model, loading it into memory if needed."""
        if self._memory is None:
            loaded = self._load_base()
            parked, self._parked = self._parked, None
            if self._applied and not (parked and parked.restore(model_tensors(loaded.model))):
                del loaded  # one base in memory at a time
                loaded = self._load_base()
                self._apply(loaded.model, self._applied)
            self._memory = loaded
        return self._memory

    def _load_base(self) -> LoadedModel:
        loaded = load_model(self._source)
        if tensors_digest(loaded.model) != self._base.digest:
            raise GymError(ErrorCode.BASE_MISMATCH, f"{self._source} is no longer the federation's base")
        return loaded

    def _apply(self, model: Any, soups: Sequence[SoupReference], at: int = 0) -> None:
        """Apply the soups from index ``at`` on to a model that has the earlier ones."""
        specs, total = specs_of(self._base, soups), None
        if soups and (name := soups[-1].sum_sha256) is not None and self._store.has(name):
            files = [(self._store.local_path(name), specs[first_summed(soups)])]
            total = read_sum(files, str(soups[-1].integers))
        apply_soups(model, soups[at:], specs[at], self._store.local_path, total)

    def save(self, output: Path, dtype: str | None = None) -> tuple[str, float | None]:
        """Write the current version and its tokenizer to a folder; the model in memory is cast to the same dtype.

        Args:
            output: The folder.
            dtype: Dtype of the written weights. None uses the dtype of the base's own files if it preserves the
                changes of the rounds, otherwise float32, in which versions are stored.

        Returns:
            The dtype, and the share of all rounds' changes that it preserves (``gym_fed.delta.kept``); None if nothing
            changed.
        """
        tuned = model_tensors(self.model)
        base = mapped_base(Path(resolve(self._source)), tuned) or model_tensors(
            load_model(self._source).model
        )
        written = dtype or precise_dtype(dtype_of(self._source), base, tuned)
        share = share_kept(base, tuned, written)
        with quiet_loading():
            self.model.to(getattr(torch, written)).save_pretrained(output)
            self.tokenizer.save_pretrained(output)
        return written, share

    def loss(self) -> float:
        """Return the held-out loss of the current version, in nats per token."""
        return self.losses().mean

    def losses(self) -> RowLosses:
        """Return the current version's loss on every held-out row."""
        if self._known_losses is None or self._known_losses[0] != self.digest:
            self._known_losses = (self.digest, self._measure(self._rows))
        return self._known_losses[1]

    def half_losses(self) -> tuple[RowLosses, RowLosses]:
        """Return the losses of every held-out row on its even and on its odd tokens (``gym_fed.evaluation.loss``)."""
        return half_losses(
            self._loaded.model, self._loaded.tokenizer, self._rows, max_length=self._gate.max_length
        )

    @cached_property
    def heldout(self) -> str:
        """Return the digest of the truncated held-out rows; only losses with the same digest are comparable."""
        return canonical_digest({"gym-heldout-1": [self._gate.max_length, self._rows]})[:32]

    def row_losses(self, on_done: OnDone = ignore_progress) -> list[float]:
        """Return the loss of each held-out row at the current version (nats per token); NaN if it has no targets."""
        return row_losses(
            self._loaded.model,
            self._loaded.tokenizer,
            self._rows,
            max_length=self._gate.max_length,
            on_done=on_done,
        )

    def loss_with(self, delta: Path, scale: float = 1.0) -> float:
        """Return the held-out loss with ``delta`` applied temporarily, in nats per token."""
        with self.applied(delta, scale):
            return self._measure(self._rows).mean

    def loss_on(self, rows: Sequence[dict[str, Any]]) -> float:
        """Return the loss of the model in its current state on the given rows, in nats per token."""
        return self._measure(rows).mean

    def losses_with(self, delta: Path) -> RowLosses:
        """Return the loss on every held-out row with ``delta`` applied temporarily."""
        with self.applied(delta):
            return self._measure(self._rows)

    def applied(self, delta: Path, scale: float = 1.0) -> AbstractContextManager[dict[str, Any]]:
        """Apply ``delta`` to the model for the block, and restore the model afterwards."""
        return self.applied_sum([(delta, scale)])

    @contextmanager
    def applied_sum(self, deltas: Sequence[tuple[Path, float]]) -> Iterator[dict[str, Any]]:
        """Apply deltas, each scaled by its factor, for the block; yield the original values of the changed tensors."""
        # admission has checked the version, and a continuous round takes updates of earlier ones
        with ExitStack() as stack:
            opened = [
                stack.enter_context(DeltaFile.open(path, self.spec, any_version=True)) for path, _ in deltas
            ]
            names = sorted({name for delta in opened for name in delta.names})
            before = stack.enter_context(self._restored(names))
            for delta, (_, scale) in zip(opened, deltas, strict=True):
                apply_delta(self._loaded.model, delta, scale)
            yield before

    def game(self, updates: Sequence[DeltaFile], coefficients: Sequence[float]) -> SoupGame:
        """Return the cooperative game of the updates; a coalition's value is its soup's held-out loss."""
        return SoupGame(
            self._loaded.model,
            self._loaded.tokenizer,
            updates,
            self._rows,
            coefficients,
            max_length=self._gate.max_length,
        )

    @contextmanager
    def borrowed(self) -> Iterator[dict[str, Any]]:
        """Yield a copy of the current tensors, and restore them after the caller has trained the model in place.

        LoRA layers are removed too, even if the training raised an exception.
        """
        model = self._loaded.model
        with self._restored(list(model_tensors(model))) as before:
            try:
                yield before
            finally:
                _take_off_lora(model)
                model.zero_grad(set_to_none=True)
                model.eval()

    def _measure(self, rows: Sequence[dict[str, Any]]) -> RowLosses:
        return heldout_row_losses(
            self._loaded.model, self._loaded.tokenizer, rows, max_length=self._gate.max_length
        )

    @contextmanager
    def _restored(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        tensors = model_tensors(self._loaded.model)
        kept = {name: tensors[name].detach().clone() for name in names}
        try:
            yield kept
        finally:
            now = model_tensors(self._loaded.model)  # moving a model replaces the storage of its parameters
            for name, tensor in kept.items():
                now[name].copy_(tensor)


def _take_off_lora(model: Any) -> None:
    """Unwrap the layers that PEFT replaced, even if training failed before it returned the PEFT model."""
    if "peft" not in sys.modules:
        return
    from peft.tuners.lora import LoraLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLayer):
            model.set_submodule(name, layer.get_base_layer())
    vars(model).pop("peft_config", None)


def coordinator_rows(
    source: str, layout: str, max_examples: int, folder: Path, split: Literal["train", "heldout"]
) -> list[dict[str, Any]]:
    """Load the coordinator's rows from a generated ``task:`` or from a file (relative to ``folder``).

    From a longer file, ``max_examples`` representative rows are selected.

    Raises:
        GymError: ``DATA_INVALID`` or ``FILE_NOT_FOUND``, naming the source.
    """
    if source.startswith("task:"):
        names = [part.strip().removeprefix("task:") for part in source.split(",")]
        share = max(1, max_examples // len(names))
        return [row for name in names for row in generate(name, share, seed=0, split=split)]
    return representative(SourceRows(DataConfig(path=folder / source, format=layout)), max_examples)


def write_version(
    state: HubState, config: ServerConfig, output: Path, height: int | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """Write version ``height`` (the current one by default) with its tokenizer to a new folder.

    The digest of its tensors is recorded, so that the hub recognises variants trained from the folder.

    Args:
        state: The hub's state.
        config: The hub's config.
        output: A new folder.
        height: Height of the version.
        dtype: See ``HubModel.save``.

    Raises:
        GymError: ``FILE_EXISTS`` if the folder is not empty, ``NOT_FOUND`` if the version does not exist,
            ``USAGE`` for an unknown dtype.
    """
    if dtype is not None and dtype not in DTYPES:
        raise GymError(
            ErrorCode.USAGE, f"dtype {plain(dtype, 40)!r} is unknown", f"use one of {', '.join(DTYPES)}"
        )
    selected = state.round_store.head().height if height is None else height
    state.round_store.version(selected)  # raises if there is no such version
    if output.exists() and any(output.iterdir()):
        raise GymError(ErrorCode.FILE_EXISTS, f"{output} is not empty", "choose a new folder")
    model = HubModel.of(state, config)
    model.follow(state.round_store.soups(selected))
    written, share = model.save(output, dtype)
    tensors = tensors_digest(model.model.float())  # the folder is loaded in float32, so the digest is too
    with state.database.transaction() as tx:
        if tx.scalar(select(published.c.height).where(published.c.digest == tensors)) is None:
            tx.execute(published.insert().values(digest=tensors, height=selected))
    return {
        "height": selected,
        "digest": model.digest,
        "base_digest": tensors,
        "base_model": config.public_base_name,
        "dtype": written,
        "kept": share,
        "folder": str(output),
    }


def dtype_of(base_model: str) -> str:
    """Return the dtype in a model folder's config; ``float32`` if it is missing or not supported."""
    try:
        config = read_object(Path(resolve(base_model)) / "config.json")
    except OSError:
        return "float32"
    found = config.get("dtype") or config.get("torch_dtype")
    return found if found in DTYPES else "float32"
