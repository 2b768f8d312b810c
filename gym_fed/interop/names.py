"""Python names of other tools (modules, classes, methods) and ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from gym_fed.core.aliases import note
from gym_fed.interop.row import BroughtWord


def _from(module: str, name: str = "") -> Callable[[], Any]:
    """Imports a module, or takes a name of it, when it is asked for."""

    def take() -> Any:
        found = importlib.import_module(module)
        return getattr(found, name) if name else found

    return take


def _model_registry() -> Any:
    """The one on the default store, for calls on the class."""
    from gym_fed.registry import ModelRegistry

    note("ModelRegistry.push, .pull", "`ModelRegistry(store).push`, `.pull`")
    return ModelRegistry()


ATTRIBUTES: dict[tuple[str, str], Callable[[], Any]] = {
    ("gym_fed", "DeltaSoupConfig"): _from("gym_fed.config.hub.soup", "DeltaSoupConfig"),
    ("gym_fed", "BitDeltaConfig"): _from("gym_fed.quantization.config", "BitDeltaConfig"),
    ("gym_fed.data", "MixedDataset"): _from("gym_fed.data.pipeline", "DataPipeline"),
    ("DataPipeline", "build"): _from("gym_fed.interop.methods", "build"),
    ("Trainer", "apply_deltasoup"): _from("gym_fed.interop.methods", "apply_deltasoup"),
    ("Trainer", "fit"): _from("gym_fed.interop.methods", "fit"),
    ("ModelRegistry", "push"): lambda: _model_registry().push,
    ("ModelRegistry", "pull"): lambda: _model_registry().pull,
    ("DatasetRegistry", "push"): _from("gym_fed.interop.datasets", "push"),
    ("DatasetRegistry", "pull"): _from("gym_fed.interop.datasets", "pull"),
}
"""By the module (its name) or class (its own name) that is asked, and the name that it is asked for."""

NAMES = [
    BroughtWord("Python", "trainer.fit(dataset)", "`trainer.train(dataset)`"),
    BroughtWord(
        "Python",
        'trainer.train(dataset="name")',
        "the same: a path, `data/dataset_info.json`, catalogue, registry",
    ),
    BroughtWord(
        "Python", "trainer.apply_deltasoup()", "the soups of the hub that was joined, `others={...}`"
    ),
    BroughtWord("Python", "from gym_fed.train import run_sft", "`Trainer(config).train()`"),
    BroughtWord("Python", "from gym_fed.hparams import get_train_args", "`load_training_config(file)`"),
    BroughtWord("Python", "exp.log_metrics(results)", "the same: the step counts on by itself"),
    BroughtWord("Python", "from gym_fed import quickstart", "the same; a run of `Trainer` on gym-nano"),
    BroughtWord("Python", "from gym_fed.eval import ...", "`gym_fed.evaluation`"),
    BroughtWord(
        "Python",
        'Evaluator(benchmarks=["exact-match tasks"], model=)',
        "the same; `gym_fed.evaluation.exact_match`",
    ),
    BroughtWord(
        "Python",
        'Evaluator(benchmarks=["mmlu", "hellaswag", ...])',
        "the same; rows that are not here: `gym eval fetch mmlu hellaswag`",
    ),
    BroughtWord(
        "Python",
        "Evaluator(...).submit_to_leaderboard(model_name=, organization=)",
        "the same; a signed line of `leaderboard.jsonl`",
    ),
    BroughtWord(
        "Python",
        "from gym_fed.registry import ModelRegistry",
        "the same",
    ),
    BroughtWord(
        "Python",
        'DatasetRegistry.push(name, dataset, license="cc-by-4.0")',
        "`DatasetRegistry(store).push(...)`",
    ),
    BroughtWord(
        "Python", 'DatasetRegistry.pull("org/corpus")', "`DatasetRegistry(store).pull(name, folder)`"
    ),
    BroughtWord(
        "Python", 'DataPipeline(sources=[("s3://...", 0.3)], tokenizer="name").build()', "the pipeline itself"
    ),
    BroughtWord("Python", "from gym_fed.data import MixedDataset", "`DataPipeline`"),
]
"""What each is called here."""
