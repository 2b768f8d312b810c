"""A regional hub as the source of updates: its rounds start from the root's version and return the merged result.

The hub runs as a separate process next to this agent; they communicate through the exchange in the hub's folder.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_client.agent.data import Data
from gym_client.agent.hooks import TimeLimit, current_hooks
from gym_client.agent.version_sum import VersionSum
from gym_client.hub.heads import Heads
from gym_client.hub.transfers import ObjectCache, download
from gym_client.hub.transport import HubClient
from gym_client.identity.home import Home
from gym_client.identity.pins import with_account
from gym_client.ledger.copy import LedgerCopy
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.server import CONFIG_NAME, ServerConfig
from gym_fed.config.hub.task import TaskSpec, TrainingRecipe, first_summed
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256
from gym_fed.core.json_files import canonical_digest
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.ledger.export import verify_file
from gym_fed.trust.ledger.lineage import VERSION
from gym_fed.trust.regions.exchange import RegionExchange, RegionVersion, RootVersion

if TYPE_CHECKING:
    from torch import nn

_POLL_SECONDS = 0.3
_SHARE_TO_SEND = 0.2
"""Fraction of the time until the root's deadline that is reserved for encoding and upload. When only that is left, the
newest version of the region is sent, even if fewer rounds than planned are done."""


@dataclass(frozen=True)
class RegionalUpdate:
    """The region's newest version, as a model to encode.

    Attributes:
        model: The base model with the weights of that version.
        num_examples: Number of examples of the region's members.
        metrics: Metrics for the manifest.
    """

    model: Any
    num_examples: int
    metrics: dict[str, float]


class RegionalHub:
    """The agent's side of the exchange with a regional hub.

    Args:
        folder: The regional hub's folder.

    Raises:
        GymError: ``FILE_NOT_FOUND`` or ``CONFIG_INVALID`` if the folder contains no hub, or one that is not a region.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().absolute()
        path = self.folder / CONFIG_NAME
        if not path.is_file():
            raise GymError(
                ErrorCode.FILE_NOT_FOUND,
                f"no hub in {self.folder}",
                "pass the folder created by gym-server init",
            )
        config = load_config(path, ServerConfig)
        self.name, self._root = config.name, config.region.root if config.region is not None else None
        self._exchange = RegionExchange(self.folder)

    def require_root(self, server: str) -> None:
        """Raise ``CONFIG_INVALID`` unless this is the root that the region's members agreed to."""
        if self._root != server:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"region.root of {self.folder / CONFIG_NAME} is {self._root or 'not set'}, but this hub is {server}",
                f"write `region: {{root: {server}}}` into that file and start that hub; its members must agree to it",
            )

    def data(self) -> Data:
        """Return a description of the region, used where other contributors have rows."""
        digest = canonical_digest({"region": str(self.folder)})
        return Data([], f"the merged rounds of the regional hub {self.name!r} in {self.folder}", digest)

    def keep_receipt(self, receipt: dict[str, Any]) -> None:
        """Pass the receipt of an update to the regional hub, which records it in its ledger."""
        if receipt.get("update"):
            self._exchange.put_receipt(receipt)

    def update(self, spec: TaskSpec, home: Home, source: str, time_limit: TimeLimit) -> RegionalUpdate:
        """Let the region work on a task, and return the region's newest version.

        Args:
            spec: The root's task; this machine's integer sum is already that of the task's version.
            home: The home that contains the sum.
            source: Source of the base model.
            time_limit: Time limit of the task.

        Raises:
            GymError: ``POLICY_REFUSED`` for a task that a region cannot perform, or after the time limit;
                ``INTERRUPTED``; errors from the exchange.
        """
        require_region_can(spec.recipe, spec.codec)
        if first_summed(spec.soups):
            raise _refused(
                "the root's soups are not integer sums",
                "recipe.finetuning: full and soup.codec: lattice",
            )
        self.require_root(spec.server)
        self._hand_over(root_version(spec, home), sum_of(spec, home))
        version = self._finished(spec, time_limit)
        metrics = {"num_rounds": float(version.num_rounds), "num_updates": float(version.num_updates)}
        return RegionalUpdate(self._model(version, spec, source), version.num_examples, metrics)

    def end(self, client: HubClient) -> None:
        """Pass on the root's last version, after which the region ends.

        Raises:
            GymError: Errors from the ledger and the download.
        """
        status = client.status()
        key = bytes.fromhex(client.pin.ledger_key)
        copy, made = LedgerCopy(client.home, key), _SummedVersions()
        head = copy.sync(client)
        verify_file(copy.path, key, made)
        integers, path = made.by_digest.get(status.version_digest), None
        if integers is not None:
            cache = ObjectCache(client.home.objects)
            path = download(client, cache, str(integers["sum"]), int(integers["sum_bytes"]))
        last = RootVersion(
            root=client.pin.server,
            root_key=client.pin.ledger_key,
            root_round=0,
            root_size=head.size,
            base_digest=status.base_digest,
            version_digest=status.version_digest,
            integers=None if integers is None else integers["digest"],
            sum_sha256=None if integers is None else integers["sum"],
            is_last=True,
        )
        self._hand_over(last, path)
        if path is not None:
            path.unlink()

    def _hand_over(self, version: RootVersion, path: Path | None) -> None:
        if self._exchange.root_version() != version:
            self._exchange.put_root_version(version, path)

    def _finished(self, spec: TaskSpec, time_limit: TimeLimit) -> RegionVersion:
        """Wait for the region's rounds. Return its version when they are done, or shortly before the deadline."""
        hooks, begun = current_hooks(), current_hooks().now()
        send_at = spec.deadline_seconds - _SHARE_TO_SEND * max(0.0, spec.deadline_seconds - begun)
        while True:
            found = self._exchange.region_version()
            if found is not None and found.root_version == spec.version_digest and found.num_rounds:
                if found.num_rounds >= found.max_rounds or hooks.now() > send_at:
                    return found
                hooks.progress("region", found.num_rounds, found.max_rounds, None)
            time_limit.require("the region's rounds")
            time.sleep(_POLL_SECONDS)

    def _model(self, version: RegionVersion, spec: TaskSpec, source: str) -> nn.Module:
        from gym_fed.base.models import load_model
        from gym_fed.delta.base import BaseSpec, model_tensors
        from gym_fed.delta.integer_sum import read_sum

        path = self._exchange.sum_path(version)
        model: nn.Module = load_model(source, dtype="float32", device="cpu").model
        base = BaseSpec.of(model, source)
        if path is None or not base.digest == version.base_digest == spec.base_digest:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"the region's base is {version.base_digest}, the root's {spec.base_digest}, but {source!r} has "
                f"{base.digest}",
                "a region and its root need the same base_model",
            )
        read_sum([(path, base)], str(version.integers)).apply(model_tensors(model))
        return model


class _SummedVersions:
    """Ledger visitor that collects the integer sums of the versions.

    Attributes:
        by_digest: ``digest``, ``sum`` and ``sum_bytes`` of each version, by the version's digest.
    """

    def __init__(self) -> None:
        self.by_digest: dict[str, dict[str, Any]] = {}

    def __call__(self, entry: Entry, body: dict[str, Any]) -> None:
        """Process the next entry."""
        if entry.kind == VERSION and "integers" in body:
            self.by_digest[body["digest"]] = body["integers"]


def require_region_can(recipe: TrainingRecipe, codec: CodecPolicy) -> None:
    """Raise ``POLICY_REFUSED`` for a root recipe that regional rounds do not support."""
    if recipe.sends_factors:
        raise _refused(
            "the root requests LoRA factors, but a region adds up full updates", "recipe.finetuning: full"
        )
    if recipe.privacy is not None:
        raise _refused("the root requests DP-SGD, but a region has no rows", "recipe.privacy: null")
    if codec.distill_steps:
        raise _refused("the root requests distillation, but a region has no rows", "codec.distill_steps: 0")


def root_version(spec: TaskSpec, home: Home) -> RootVersion:
    """Return a task's version in the form that the exchange passes to the region."""
    key = next(pin.ledger_key for pin in with_account(home) if pin.server == spec.server)
    newest = Heads(home, bytes.fromhex(key)).newest()
    path = sum_of(spec, home)
    return RootVersion(
        root=spec.server,
        root_key=key,
        root_round=spec.server_round,
        root_size=newest.size if newest is not None else 0,
        base_digest=spec.base_digest,
        version_digest=spec.version_digest,
        integers=spec.soups[-1].integers if spec.soups else None,
        sum_sha256=file_sha256(path) if path is not None else None,
    )


def sum_of(spec: TaskSpec, home: Home) -> Path | None:
    """Return the file with the integer sum of a task's version; None if the version is the base."""
    return VersionSum(home.versions(spec.server)).path(spec.version_digest) if spec.soups else None


def _refused(what: str, remedy: str) -> GymError:
    return GymError(
        ErrorCode.POLICY_REFUSED, f"a region cannot perform this task: {what}", f"the root must set {remedy}"
    )
