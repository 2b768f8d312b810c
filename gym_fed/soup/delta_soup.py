"""DeltaSoup in Python: merge contributions to one base model without a server.

soup = DeltaSoup(DeltaSoupConfig(base_model="gym-nano", num_malicious_nodes=1))
soup.contribute(user_id="ada", model="runs/ada").contribute(user_id="ben", model="ben.gymdelta")
result = soup.contribute(user_id="eve", model=tuned).aggregate(min_contributors=3)
result.apply(model)
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from gym_fed.base.modeling.adapters import merged
from gym_fed.base.modeling.differences import require_same_settings
from gym_fed.base.models import LoadedModel, load_model, load_tuned, model_name
from gym_fed.config.hub.soup import DeltaSoupConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import METHODS
from gym_fed.delta.base import BaseSpec, Tensors, model_tensors
from gym_fed.delta.encode import encode_delta, lora_delta
from gym_fed.delta.factors import lora_change
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.privacy.accountant import NoiseEvent, epsilon
from gym_fed.privacy.noise import SEED_BYTES
from gym_fed.soup.building import build, is_method
from gym_fed.soup.credit import split_pool
from gym_fed.soup.merging import SoupReport, merge
from gym_fed.soup.model_merging import ModelMergeReport, merge_models
from gym_fed.soup.private import PrivateMerge
from gym_fed.soup.screening import screen_norms

_MIN_FOR_NORM_SCREEN = 3


@dataclass(frozen=True)
class SoupResult:
    """A merged soup, and the outcome of every contribution.

    Attributes:
        path: The soup, a ``.gymdelta`` in a temporary folder that lives as long as this object; ``save`` keeps it.
        merged: Ids of the contributors in the soup, in the order in which they contributed.
        rejected: Reason for each rejected contribution, by contributor id.
        rewards: Credits of every contributor; empty without ``enable_rewards``.
        report: Report of the merge.
        epsilon: Total privacy loss of all soups of this ``DeltaSoup`` so far, at its ``target_delta``; None without
            ``differential_privacy``.
    """

    path: Path
    merged: tuple[str, ...]
    rejected: Mapping[str, str]
    rewards: Mapping[str, int]
    report: SoupReport | ModelMergeReport = field(repr=False)
    epsilon: float | None = None
    _folder: Any = field(default=None, repr=False, compare=False)

    def apply(self, model: nn.Module | Tensors) -> None:
        """Add the soup to a model of its base, in place.

        Raises:
            GymError: ``BASE_MISMATCH`` if the model is not the soup's base.
        """
        with DeltaFile.open(self.path, BaseSpec.of(model, "model")) as soup:
            apply_delta(model, soup)

    def save(self, path: str | Path) -> Path:
        """Copy the soup to a file.

        Raises:
            GymError: ``FILE_EXISTS`` if the file exists.
        """
        target = Path(path)
        if target.exists():
            raise GymError(ErrorCode.FILE_EXISTS, f"{target} exists", "choose another name")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.path, target)
        return target


class DeltaSoup:
    """Collects contributions to one base model and merges them.

    Args:
        config: The merge rules.
        base: The base model as a module in memory; by default ``config.base_model`` is loaded.
    """

    def __init__(self, config: DeltaSoupConfig, base: nn.Module | None = None) -> None:
        if (base is None) == (config.base_model is None):
            raise GymError(
                ErrorCode.USAGE, "pass the base model once: DeltaSoupConfig(base_model=...) or base=..."
            )
        self.config = config
        named = load_model(str(config.base_model)) if base is None else None
        loaded: Any = base if named is None else named.model
        self._settings = SimpleNamespace(config=getattr(loaded, "config", None))
        self._tokenizer = None if named is None else named.tokenizer
        self._base = {name: tensor.detach().clone() for name, tensor in model_tensors(loaded).items()}
        self.spec = BaseSpec.of(self._base, model_name(config.base_model) if config.base_model else "base")
        self._folder = tempfile.TemporaryDirectory(prefix="gym-soup-")
        self._root = None if config.root is None else self._as_delta("root", config.root, "root")
        self._contributions: dict[str, tuple[Path, int]] = {}
        self._soups = 0

    def contribute(
        self,
        *,
        user_id: str,
        model: nn.Module | Tensors | str | Path,
        num_examples: int = 1,
        allow_differences: bool = False,
    ) -> DeltaSoup:
        """Add a contributor's update.

        Args:
            user_id: Id of the contributor, who may contribute once.
            model: A ``.gymdelta`` of this base, used unchanged; or a fine-tune (a folder, a name, a module, tensors by
                name), which is written as a delta with ``config.codec``. A PEFT model, or the folder of one, keeps its
                LoRA factors.
            num_examples: Number of training examples, for ``weighting: num_examples``.
            allow_differences: Accept a fine-tune whose config or tokenizer differs from the base's; a soup contains
                neither.

        Returns:
            This object, for chaining.

        Raises:
            GymError: ``USAGE`` for a second contribution; ``BASE_MISMATCH``, ``DELTA_INVALID`` or ``MODEL_NOT_FOUND``
                if ``model`` is not a fine-tune of the base. Earlier contributions are kept.
        """
        if user_id in self._contributions:
            raise GymError(
                ErrorCode.USAGE,
                f"{user_id!r} has contributed already",
                "each contributor may contribute once",
            )
        if num_examples < 1:
            raise GymError(
                ErrorCode.USAGE, f"{user_id!r}: num_examples is {num_examples}, but must be at least 1"
            )
        name = f"update-{len(self._contributions)}"
        self._contributions[user_id] = (
            self._as_delta(user_id, model, name, allow_differences),
            num_examples,
        )
        return self

    def _as_delta(
        self, who: str, model: nn.Module | Tensors | str | Path, name: str, allow_differences: bool = False
    ) -> Path:
        """Write the ``model`` of ``who`` to the temporary folder as ``name``. Raises the errors of ``contribute``."""
        path = Path(self._folder.name) / f"{name}.gymdelta"
        if isinstance(model, str | Path) and str(model).endswith(".gymdelta"):
            with DeltaFile.open(model, self.spec):
                shutil.copyfile(model, path)
            return path
        loaded = self._loaded(str(model)) if isinstance(model, str | Path) else None
        tuned: Any = model if loaded is None else loaded.model
        tokenizers = (self._tokenizer, None if loaded is None else loaded.tokenizer)
        require_same_settings(who, self._settings, tuned, tokenizers, allow=allow_differences)
        self._write(tuned, path)
        with DeltaFile.open(path, self.spec):
            pass
        return path

    @property
    def contributors(self) -> tuple[str, ...]:
        """Names of the contributors, in order."""
        return tuple(self._contributions)

    def aggregate(self, min_contributors: int = 3) -> SoupResult:
        """Screen and merge the contributions, and divide the credits.

        Raises:
            GymError: ``ROUND_ABORTED`` if fewer than ``min_contributors`` contributions pass the norm screen;
                ``CONFIG_INVALID`` if they are too few for the merge rules.
        """
        if min_contributors < 1:
            raise GymError(ErrorCode.USAGE, f"min_contributors is {min_contributors}, but must be at least 1")
        with contextlib.ExitStack() as stack:
            opened = {
                user: (stack.enter_context(DeltaFile.open(path, self.spec)), examples)
                for user, (path, examples) in self._contributions.items()
            }
            rejected = self._screen({user: delta.norm() for user, (delta, _) in opened.items()})
            merged = [user for user in opened if user not in rejected]
            if len(merged) < min_contributors:
                raise GymError(
                    ErrorCode.ROUND_ABORTED,
                    f"{len(merged)} of {len(opened)} contributions can be merged; {min_contributors} are needed",
                    "; ".join(f"{user}: {why}" for user, why in rejected.items()),
                )
            self._soups += 1
            path = Path(self._folder.name) / f"soup-{self._soups}.gymdelta"
            root = None if self._root is None else stack.enter_context(DeltaFile.open(self._root, self.spec))
            report = self._merge([opened[user] for user in merged], root, path)
        shares = {user: float(user in merged) for user in opened} if self.config.enable_rewards else {}
        rewards = split_pool(self.config.reward_pool, shares)
        return SoupResult(path, tuple(merged), rejected, rewards, report, self._epsilon(), self._folder)

    def _epsilon(self) -> float | None:
        privacy = self.config.differential_privacy
        if privacy is None:
            return None
        event = NoiseEvent(
            mechanism=privacy.mechanism, noise_multiplier=privacy.noise_multiplier, count=self._soups
        )
        return epsilon([event], privacy.target_delta)

    def _private(self) -> PrivateMerge | None:
        privacy = self.config.differential_privacy
        return PrivateMerge(privacy, os.urandom(SEED_BYTES), tuple(self.spec.shapes)) if privacy else None

    def _merge(
        self, updates: list[tuple[DeltaFile, int]], root: DeltaFile | None, path: Path
    ) -> SoupReport | ModelMergeReport:
        config, files = self.config, [delta for delta, _ in updates]
        if not is_method(config.method.value):
            recipe = config.recipe(len(files))
            weights = recipe.weights([n for _, n in updates])
            return merge(files, weights, recipe, path, self.spec, root=root, private=self._private())
        if config.pre_aggregators or config.malicious_of(len(files)):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"merge method {config.method.value!r} trusts every model: it takes no pre_aggregators and withstands "
                "no malicious client",
                "use an aggregator such as byzantine_robust",
            )
        rule = build(METHODS.type_of(config.method.value), config.method_options, "method_options")
        if rule.statistics is not None or rule.uses_score:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"merge method {rule.name!r} needs more than the models: {rule.statistics or 'a held-out score'}",
                "use gym soup merge, which accepts it",
            )
        cap = config.num_examples_cap
        weights = [1.0 if cap is None else float(min(n, cap)) for _, n in updates]
        base = self._base if rule.uses_base else None
        return merge_models(files, weights, rule, config.soup_codec, path, self.spec, base=base)

    def _loaded(self, name: str) -> LoadedModel:
        base = self.config.base_model
        return load_model(name) if base is None else load_tuned(name, str(base))

    def _screen(self, norms: Mapping[str, float]) -> dict[str, str]:
        if self.config.norm_ratio is None or len(norms) < _MIN_FOR_NORM_SCREEN:
            return {}
        verdicts = screen_norms(list(norms.values()), self.config.norm_ratio)
        return {user: v.reason for user, v in zip(norms, verdicts, strict=True) if not v.accepted}

    def _write(self, model: Any, path: Path) -> None:
        if hasattr(model, "peft_config"):
            change = lora_change(model, self._base)
            if change.factors:
                lora_delta(change.factors, path, self.spec, values=change.values)
                return
            model = merged(copy.deepcopy(model))
        encode_delta(model, self._base, self.config.codec, path, self.spec)
