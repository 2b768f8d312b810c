"""Python names of other tools (modules, classes, methods) and ours."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gym_fed.core.aliases import note
from gym_fed.core.errors import ErrorCode
from gym_fed.interop.draft import Alias, Unsupported

if TYPE_CHECKING:
    from gym_fed.config.train.training import TrainingConfig


_NO_SOUPS = Unsupported(
    "no soup of a hub is on this machine; a contributor gets them with its tasks",
    (
        'trainer.apply_deltasoup({"ada": "ada.gymdelta", "ben": "ben.gymdelta"})',
        "gym-client join HUB --data my.jsonl",
    ),
)


def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``Trainer.train``."""
    note("trainer.fit", "`trainer.train`")
    return trainer.train(*args, **kwargs)


def build(pipeline: Any) -> Any:
    """Return the pipeline itself, which is iterable: rows are read lazily."""
    note("DataPipeline.build", "not needed (iterate over the pipeline)")
    return pipeline


def apply_deltasoup(trainer: Any, settings: Any = None) -> Any:
    """Call ``Trainer.apply_deltasoup`` with the newest global version of the hub that this machine has joined.

    Raises:
        GymError: ``NOT_FOUND`` if no soup of a hub is on this machine; ``BASE_MISMATCH`` if the hub has another base.
    """
    others = {"hub": _newest_version(trainer.config)}
    note("trainer.apply_deltasoup()", '`trainer.apply_deltasoup({"hub": MODEL})`')
    return trainer.apply_deltasoup(others, settings)


def _newest_version(config: TrainingConfig) -> Any:
    """Build the newest global version from the run's base and the soups in the contributor's home."""
    from gym_client.agent.global_model import GlobalModel
    from gym_client.hub.transfers import ObjectCache
    from gym_client.identity.home import Home

    from gym_fed.config.hub.task import TaskSpec

    home = Home.open()
    texts = [path.read_text(encoding="utf-8") for path in home.tasks.glob("*/task.json")]
    specs = [TaskSpec.model_validate(json.loads(text)["spec"]) for text in texts]
    with_soups = [spec for spec in specs if spec.soups]
    if not with_soups or config.model is None:
        raise _NO_SOUPS.error("trainer.apply_deltasoup()", code=ErrorCode.NOT_FOUND)
    newest = max(with_soups, key=lambda spec: (spec.deadline_seconds, spec.server_round))
    version = GlobalModel(config.model)
    version.advance(newest, ObjectCache(home.objects).path)
    return version.model


def _import(module: str, name: str) -> Callable[[], Any]:
    """Return a function that imports ``name`` from ``module``."""
    return lambda: getattr(importlib.import_module(module), name)


def _model_registry() -> Any:
    """Open the registry in the default store, for calls on the class."""
    from gym_fed.registry import ModelRegistry

    note("ModelRegistry.push, .pull", "`ModelRegistry(store).push`, `.pull`")
    return ModelRegistry()


ATTRIBUTES: dict[tuple[str, str], Callable[[], Any]] = {
    ("gym_fed", "DeltaSoupConfig"): _import("gym_fed.config.hub.soup", "DeltaSoupConfig"),
    ("gym_fed", "BitDeltaConfig"): _import("gym_fed.quantization.config", "BitDeltaConfig"),
    ("gym_fed.data", "MixedDataset"): _import("gym_fed.data.pipeline", "DataPipeline"),
    ("DataPipeline", "build"): lambda: build,
    ("Trainer", "apply_deltasoup"): lambda: apply_deltasoup,
    ("Trainer", "fit"): lambda: fit,
    ("ModelRegistry", "push"): lambda: _model_registry().push,
    ("ModelRegistry", "pull"): lambda: _model_registry().pull,
    ("DatasetRegistry", "push"): _import("gym_fed.interop.datasets", "push"),
    ("DatasetRegistry", "pull"): _import("gym_fed.interop.datasets", "pull"),
}
"""Attributes of our modules and classes under the names that other tools use."""

NAMES = [
    Alias("Python", "trainer.fit(dataset)", "`trainer.train(dataset)`"),
    Alias(
        "Python",
        'trainer.train(dataset="name")',
        "the same: a path, `data/dataset_info.json`, catalogue, registry",
    ),
    Alias("Python", "trainer.apply_deltasoup()", "the soups of the hub that was joined, `others={...}`"),
    Alias("Python", "from gym_fed.train import run_sft", "`Trainer(config).train()`"),
    Alias("Python", "from gym_fed.hparams import get_train_args", "`load_training_config(file)`"),
    Alias("Python", "exp.log_metrics(results)", "the same: the step counts on by itself"),
    Alias("Python", "from gym_fed import quickstart", "the same; a run of `Trainer` on gym-nano"),
    Alias("Python", "from gym_fed.eval import ...", "`gym_fed.evaluation`"),
    Alias(
        "Python",
        'Evaluator(benchmarks=["exact-match tasks"], model=)',
        "the same; `gym_fed.evaluation.exact_match`",
    ),
    Alias(
        "Python",
        'Evaluator(benchmarks=["mmlu", "hellaswag", ...])',
        "the same; rows that are not here: `gym eval fetch mmlu hellaswag`",
    ),
    Alias(
        "Python",
        "Evaluator(...).submit_to_leaderboard(model_name=, organization=)",
        "the same; a signed line of `leaderboard.jsonl`",
    ),
    Alias(
        "Python",
        "from gym_fed.registry import ModelRegistry",
        "the same",
    ),
    Alias(
        "Python",
        'DatasetRegistry.push(name, dataset, license="cc-by-4.0")',
        "`DatasetRegistry(store).push(...)`",
    ),
    Alias("Python", 'DatasetRegistry.pull("org/corpus")', "`DatasetRegistry(store).pull(name, folder)`"),
    Alias(
        "Python", 'DataPipeline(sources=[("s3://...", 0.3)], tokenizer="name").build()', "the pipeline itself"
    ),
    Alias("Python", "from gym_fed.data import MixedDataset", "`DataPipeline`"),
]
"""The rows of the table for Python names."""
