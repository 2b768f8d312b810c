"""The table of aliases for names used by other projects, and its lookups for names that the core does not know."""

from __future__ import annotations

import importlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.aliases import MISSING, Place, Reading, note
from gym_fed.core.errors import ErrorCode
from gym_fed.interop import serving_keys, training_keys
from gym_fed.interop.commands import COMMANDS
from gym_fed.interop.draft import Alias, Draft, KeyAlias, Unsupported

if TYPE_CHECKING:
    from gym_fed.config.train.training import TrainingConfig


FORMATS = {
    "hf": "huggingface", "safetensors": "huggingface", "transformers": "huggingface", "merged": "huggingface",
    "vllm": "huggingface", "sglang": "huggingface", "tgi": "huggingface",
    "peft": "adapter", "lora": "adapter", "gymdelta": "delta", "bitdelta": "delta",
    "llama_cpp": "gguf", "llama.cpp": "gguf", "ollama": "gguf",
    "lora_gguf": "gguf_adapter", "gguf_lora": "gguf_adapter",
    "pt2": "torch_export", "exported_program": "torch_export", "jit": "torchscript", "torch_script": "torchscript",
    "trtllm": "tensorrt_llm", "tensorrt": "tensorrt_llm", "core_ml": "coreml", "mlpackage": "coreml",
    "pte": "executorch", "et": "executorch", "ov": "openvino", "autoawq": "awq", "autogptq": "gptq",
    "auto_awq": "awq", "auto_gptq": "gptq",
}  # fmt: skip
"""gym-fed's formats by their names in other tools."""

REFUSED_FORMATS = {
    "merged_16bit": Unsupported(
        "the dtype of a merged folder is set with --dtype",
        (
            "gym export MODEL --format huggingface --dtype bfloat16 -o FOLDER",
            "gym export MODEL --format huggingface --dtype float16 -o FOLDER",
        ),
    ),
    "merged_4bit": Unsupported(
        "4-bit weights are written as AWQ, GPTQ or GGUF",
        (
            "gym export MODEL --format gptq -o FOLDER",
            "gym export MODEL --format gguf --quantization q4_k_m -o model.gguf",
        ),
    ),
}
"""Names that combine a format with an option."""

_INT4 = {"int4": "", "4bit": "", "4": "", "w4": "", "w4a16": ""}
_NO_ONE_BIT = Unsupported(
    "GGUF stores a model's weights, not a one-bit delta",
    ('trainer.export("model.gguf", quantization="q4_k_m")', 'trainer.export("mine.gymdelta")'),
)

QUANTIZATIONS: dict[str, dict[str, str | Unsupported]] = {
    "gguf": {
        "fp32": "f32", "float32": "f32", "fp16": "f16", "float16": "f16", "half": "f16", "bfloat16": "bf16",
        "int8": "q8_0", "8bit": "q8_0", "q8": "q8_0", "q6": "q6_k", "q5": "q5_k_m", "q5_k": "q5_k_m",
        "int4": "q4_k_m", "4bit": "q4_k_m", "q4": "q4_k_m", "q4_k": "q4_k_m", "bitdelta": _NO_ONE_BIT,
        "not_quantized": "bf16", "fast_quantized": "q8_0", "quantized": "q4_k_m",
    },
    "onnx": {"8bit": "int8", "dynamic": "int8", "q8": "int8", "qint8": "int8", "fp32": "float32", "f32": "float32"},
    "awq": {**_INT4},
    "gptq": {**_INT4, "int8": "w8", "8bit": "w8", "8": "w8", "w8a16": "w8"},
    "delta": {"bitdelta": ""},
}  # fmt: skip
"""gym-fed's quantizations by their names in other tools, for each format; empty for the format's default."""

_EXPORTS = [
    Alias(
        "Python",
        'trainer.export("model.gguf", quantization="bitdelta")',
        _NO_ONE_BIT.why,
        _NO_ONE_BIT.instead,
    ),
    Alias(
        "command",
        "gym export --model saves/model --format gguf",
        "the same; without `--output` it writes `model.gguf`",
    ),
    *(
        Alias("command", f"gym export MODEL --format {theirs}", f"`--format {ours}`")
        for theirs, ours in FORMATS.items()
    ),
    *(
        Alias("command", f"gym export MODEL --format {theirs}", what.why, what.instead)
        for theirs, what in REFUSED_FORMATS.items()
    ),
    *(
        Alias(
            "command",
            f"gym export MODEL --format {form} --quantization {theirs}",
            f"`--quantization {ours}`" if ours else "not needed (it is the default)",
        )
        for form, words in QUANTIZATIONS.items()
        for theirs, ours in words.items()
        if isinstance(ours, str)
    ),
]

_NO_SOUPS = Unsupported(
    "no hub's soups are on this machine; a contributor receives them with its tasks",
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
        GymError: ``NOT_FOUND`` if no soup of a hub is on this machine; ``BASE_MISMATCH`` if the hub has a different
            base.
    """
    others = {"hub": _newest_version(trainer.config)}
    note("trainer.apply_deltasoup()", '`trainer.apply_deltasoup({"hub": MODEL})`')
    return trainer.apply_deltasoup(others, settings)


def _newest_version(config: TrainingConfig) -> Any:
    """Build the newest global version from the run's base and the soups in the contributor's home."""
    from gym_client.agent.global_model import GlobalModel
    from gym_client.agent.version_sum import VersionSum
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
    with tempfile.TemporaryDirectory() as folder:  # a copy: an agent may be changing the home's own
        shutil.copytree(home.versions(newest.server), folder, dirs_exist_ok=True)
        version.advance(newest, ObjectCache(home.objects).path, VersionSum(Path(folder)))
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
"""Attributes of gym-fed's modules and classes under the names that other tools use."""

NAMES = [
    Alias("Python", "trainer.fit(dataset)", "`trainer.train(dataset)`"),
    Alias(
        "Python",
        'trainer.train(dataset="name")',
        "the same: a path, `data/dataset_info.json`, catalogue, registry",
    ),
    Alias("Python", "trainer.apply_deltasoup()", "the soups of the joined hub, or `others={...}`"),
    Alias("Python", "from gym_fed.train import run_sft", "`Trainer(config).train()`"),
    Alias("Python", "from gym_fed.hparams import get_train_args", "`load_training_config(file)`"),
    Alias("Python", "exp.log_metrics(results)", "the same: the step is incremented automatically"),
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
        "the same; to fetch missing rows: `gym eval fetch mmlu hellaswag`",
    ),
    Alias(
        "Python",
        "Evaluator(...).submit_to_leaderboard(model_name=, organization=)",
        "the same; a signed line of `leaderboard.jsonl`",
    ),
    Alias("Python", "from gym_fed.registry import ModelRegistry", "the same"),
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


KEYS: dict[str, list[KeyAlias]] = {
    "TrainingConfig": training_keys.WORDS,
    "ServingConfig": serving_keys.WORDS,
    "BitDeltaConfig": training_keys.BITDELTA,
    "DeltaSoupConfig": training_keys.DELTA_SOUP,
}
"""Aliases of keys by schema, in the order in which they are translated."""

NEAR_MEMBERS = training_keys.NEAR_MEMBERS
NEAR: dict[str, Mapping[str, str]] = {
    "TrainingConfig": training_keys.NEAR,
    "SearchConfig": training_keys.NEAR,
    "ServingConfig": serving_keys.NEAR,
}


def rows() -> Iterator[Alias]:
    """Yield all rows of the alias table."""
    yield from NAMES
    yield from _EXPORTS
    yield from (word.row for words in KEYS.values() for word in words if word.where == "Python")
    yield from COMMANDS
    yield from (word.row for words in KEYS.values() for word in words if word.where == "YAML")


def read(schema: str, values: Mapping[str, Any], place: Callable[[Place], str] | None) -> Reading | None:
    """See ``gym_fed.core.aliases.read``."""
    draft = Draft(values, place)
    for word in KEYS.get(schema, ()):
        word.apply(draft)
    return draft.result if draft.changed else None


def nearest(schema: str, key: str, value: Any) -> str:
    """See ``gym_fed.core.aliases.nearest``."""
    for word in KEYS.get("TrainingConfig" if schema == "SearchConfig" else schema, ()):
        if word.theirs == key and word.near_only is not None:
            return word.near_only(value)
    near = NEAR.get(schema, {})
    return near.get(key, "")


def nearest_member(kind: str, name: str) -> str:
    """See ``gym_fed.core.aliases.nearest_member``."""
    return NEAR_MEMBERS.get(kind, {}).get(name.lower(), "")


def member(kind: str, name: str) -> str | None:
    """See ``gym_fed.core.aliases.member``."""
    if kind == "export format":
        if (refused := REFUSED_FORMATS.get(name)) is not None:
            raise refused.error(f"format {name}", code=ErrorCode.USAGE)
        return FORMATS.get(name)
    form = kind.removeprefix("quantization of ")
    quantization = QUANTIZATIONS.get(form, {}).get(name) if form != kind else None
    if isinstance(quantization, Unsupported):
        raise quantization.error(f"quantization {name}", code=ErrorCode.USAGE)
    return quantization


def attribute(owner: str, name: str) -> Any:
    """See ``gym_fed.core.aliases.attribute``."""
    reference = ATTRIBUTES.get((owner, name))
    return MISSING if reference is None else reference()
