"""Default values for the model, tuning method, rows and memory of a run, without importing torch.

The schema's own defaults (all weights at 1e-3) suit gym-nano and models that start from random weights, but ruin a
pre-trained model: SmolLM2-135M-Instruct answers "What is the capital of France?" with words from the user's rows after
12 steps. For a pre-trained model of more than ``LARGE`` weights, this module chooses a value for every unset key, with
a reason, and the value is stored in the run's ``config.yaml``. For a smaller model, it only chooses a learning rate for
preferences and rewards. `gym train`, `gym webui`, `gym-server init` and `gym variant create` all call this module.
``benchmarks/defaults.py`` compares the values with those of other trainers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.train.tuning import LoraSettings
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS, OPTIMIZERS, TUNING
from gym_fed.core.text import counted

ConfigT = TypeVar("ConfigT", bound=BaseModel)

LARGE = 10_000_000
"""Number of weights above which a pre-trained model is tuned with an adapter by default."""

ADAPTER = "lora"
_SCHEDULE = "cosine"
_WARMUP_RATIO = 0.1
_ROWS_PER_STEP = ((32, 2), (96, 4))
_MAX_ROWS_PER_STEP = 8
"""(Maximum rows, rows per step): small datasets use fewer rows per step."""

_PREFERENCES = ("preference", "unpaired")
"""Kinds of rows that are used for one epoch, or for up to ``_MAX_PREFERENCE_EPOCHS`` if there are few."""
_MAX_PREFERENCE_EPOCHS = 3
_SMALL_POLICY_RATE = 1e-4
"""Learning rate for full tuning of a small pre-trained model on preferences or rewards. On 200 pairs of TruthfulQA at
1e-3, the loss of stories260K on stories rises by 0.5 (DPO) to 2.4 (KTO) nats per token. At 1e-4 every algorithm still
widens the margin of held-out pairs, and the loss rises by less than 0.05; at 2.5e-4 it rises by more for ORPO, KTO and
IPO. On pairs that prefer capitals gym-nano loses 1.9 (DPO) to 3.4 (KTO) at 1e-3 on its own tasks, and less than 0.05 at
1e-4. In 40 steps of GRPO at 1e-4, stories260K's reward rises from 0.1 to 0.8, and its loss on other stories by 0.07 to
0.09 (three seeds, ``benchmarks/grpo_rate.py``). 5e-5 needs twice the steps; at 2.5e-4 it forgets four times as much."""

_MIN_STEPS = 40
_MAX_EPOCHS = 10
_EPOCHS = ((2_000, 3), (10_000, 2))
"""(Maximum rows, epochs); larger datasets are used for one epoch."""

_LENGTH_STEP = 64
_MIN_LENGTH = 256
_JOINED_LENGTH = 1024
_OUTLIER = 4
"""Maximum ratio of the longest row to the 95th percentile at which the longest row determines ``max_length``."""
_HIGH_RATE = 10
"""Factor of the usual learning rate above which a warning is shown, since the config may have been written for another
model."""

MEMORY_SHARE = 0.7
"""Fraction of the device's memory that the estimated peak of a run may use."""

METHOD_KEYS = ("finetuning", "learning_rate", "lr_scheduler_type", "warmup_ratio")
"""Keys that ``method_defaults`` chooses."""

ROW_KEYS = ("max_length", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps")
"""Keys that ``row_defaults`` chooses."""

MEMORY_KEYS = ("gradient_checkpointing", "base_dtype")
"""Keys that ``row_defaults`` sets only if the run does not fit into memory."""

_HELD_OUT_SHARE = 0.1
_MIN_HELD_OUT, _MAX_HELD_OUT = 4, 200
_MIN_ROWS_TO_SPLIT = 20


@dataclass(frozen=True)
class Default:
    """The value chosen for a key that the user did not set.

    Attributes:
        key: Key of the config.
        value: The chosen value.
        reason: The reason, for the user.
    """

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class RowFacts:
    """The properties of rows that determine the defaults.

    Attributes:
        num_rows: Number of rows.
        longest: Tokens of the longest row; 0 if lengths do not matter.
        usual: 95th percentile of the rows' tokens.
        context: The model's context length in tokens; None if unknown.
        num_processes: Number of processes that share a step.
    """

    num_rows: int
    longest: int
    usual: int
    context: int | None
    num_processes: int = 1


def as_given(config: ConfigT) -> ConfigT:
    """Return a copy in which every key counts as set, so that no defaults are chosen for it later."""
    return config.model_copy(update={key: getattr(config, key) for key in type(config).model_fields})


def applied(config: TrainingConfig, defaults: Iterable[Default]) -> TrainingConfig:
    """Return ``config`` with the chosen values, and a section for a chosen adapter."""
    values = {default.key: default.value for default in defaults}
    if "finetuning" in values and values["finetuning"] != config.finetuning:
        values[ADAPTER] = LoraSettings()
    return config.model_copy(update=values) if values else config


def method_defaults(config: TrainingConfig, num_weights: int, *, is_quantized: bool = False) -> list[Default]:
    """Choose the tuning method, learning rate and schedule that ``config`` does not set.

    Args:
        config: Config with the algorithm, and possibly the method.
        num_weights: Number of weights of the pre-trained model.
        is_quantized: True if the model is stored quantised, so that only adapters can be trained.

    Returns:
        The defaults: none for random weights, and at most a learning rate for a model of up to ``LARGE`` weights.

    Raises:
        GymError: ``CONFIG_INVALID`` if no learning rate is known for the optimiser.
    """
    if config.model_init is not None or num_weights == 0:
        return []
    if num_weights <= LARGE:
        return _small_model_defaults(config)
    defaults, given = [], config.model_fields_set
    method = config.finetuning
    if "finetuning" not in given and (why := _needs_full(config)) is None:
        method = ADAPTER
        fact = "is quantised" if is_quantized else f"is pre-trained and has {in_words(num_weights)} weights"
        defaults.append(Default("finetuning", ADAPTER, f"the model {fact}; an adapter keeps what it knows"))
    elif "finetuning" not in given:
        defaults.append(Default("finetuning", method, str(why)))
    if "learning_rate" not in given:
        rate, reason = learning_rate(config.algorithm, method, config.optimizer)
        defaults.append(Default("learning_rate", rate, reason))
    if OPTIMIZERS.new(config.optimizer).replaces_schedule:
        return defaults
    if "lr_scheduler_type" not in given and "lr_scheduler_kwargs" not in given:
        defaults.append(
            Default("lr_scheduler_type", _SCHEDULE, "decays to 0, so that the last steps change little")
        )
    if not {"warmup_steps", "warmup_ratio"} & given and config.lr_scheduler_type != "constant":
        reason = "Adam's estimates are noisy in the first steps"
        defaults.append(Default("warmup_ratio", _WARMUP_RATIO, reason))
    return defaults


def _small_model_defaults(config: TrainingConfig) -> list[Default]:
    """Choose the learning rate of full tuning on preferences or rewards; the schema's values suit everything else."""
    algorithm = ALGORITHMS.type_of(config.algorithm)
    scale = OPTIMIZERS.new(config.optimizer).learning_rate_scale
    is_judged = algorithm.row_kind in _PREFERENCES or algorithm.needs_graders
    is_policy = is_judged and algorithm.task_type == "CAUSAL_LM"
    is_adapter = TUNING.type_of(config.finetuning).is_adapter
    is_given = "learning_rate" in config.model_fields_set
    if not is_policy or is_adapter or is_given or scale is None:
        return []
    reason = f"{config.algorithm} at the usual {config.learning_rate:g} makes a pre-trained model forget"
    return [Default("learning_rate", float(f"{_SMALL_POLICY_RATE * scale:.3g}"), reason)]


def learning_rate(algorithm: str, finetuning: str, optimizer: str = "adamw") -> tuple[float, str]:
    """Return the learning rate for a large pre-trained model, and the reason.

    Raises:
        GymError: ``CONFIG_INVALID`` if none is known for the optimiser.
    """
    scale = OPTIMIZERS.new(optimizer).learning_rate_scale
    if scale is None:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"learning_rate: no default is known for optimizer {optimizer}",
            "set learning_rate, or leave optimizer at adamw",
        )
    rate = scale * TUNING.type_of(finetuning).default_learning_rate
    rate *= ALGORITHMS.type_of(algorithm).learning_rate_scale
    reason = f"for {finetuning} under {algorithm}"
    return float(f"{rate:.3g}"), reason if scale == 1.0 else f"{reason} with {optimizer}"


def high_rate(config: TrainingConfig) -> str | None:
    """Return a warning if the learning rate that the user set would ruin a large pre-trained model; None otherwise."""
    scale = OPTIMIZERS.new(config.optimizer).learning_rate_scale
    if "learning_rate" not in config.model_fields_set or scale is None:
        return None
    usual, reason = learning_rate(config.algorithm, config.finetuning, config.optimizer)
    if config.learning_rate <= _HIGH_RATE * usual:
        return None
    times = f"{config.learning_rate / usual:.0f} times the usual {usual:g} {reason}"
    remedy = f"--learning-rate {usual:g}"
    return f"learning_rate {config.learning_rate:g} is {times}; the model can lose what it knows: {remedy}"


def _needs_full(config: TrainingConfig) -> str | None:
    """Return why an adapter cannot be the default for this config; None if it can."""
    if config.chat_template_tokens == "add":
        return "chat_template_tokens: add gives the embeddings new rows, which no adapter trains"
    if config.mixture_of_depths is not None:
        return "mixture_of_depths adds routers, which no adapter trains"
    if OPTIMIZERS.new(config.optimizer).whole_weights:
        return f"optimizer {config.optimizer} works on whole weight matrices"
    return None


def row_defaults(
    config: TrainingConfig, rows: RowFacts, peak_bytes: Callable[[TrainingConfig], float], memory_bytes: int
) -> list[Default]:
    """Choose row length, batch, epochs and memory savers that ``config`` does not set.

    Args:
        config: The config of a large pre-trained model, with ``method_defaults`` applied.
        rows: Properties of the training rows.
        peak_bytes: Function that estimates a config's peak memory.
        memory_bytes: Memory of the device.
    """
    defaults: list[Default] = []
    given = config.model_fields_set
    generates = ALGORITHMS.type_of(config.algorithm).generates

    def choose(key: str, value: Any, reason: str) -> None:
        nonlocal config
        defaults.append(Default(key, value, reason))
        config = config.model_copy(update={key: value})

    if "max_length" not in given:
        section = config.chosen_sections().get(config.algorithm)
        room = int(getattr(section, "max_completion_length", 0)) if generates else 0
        choose("max_length", *_length(rows, room))
    if not {"max_steps", "num_train_epochs"} & given:
        choose("num_train_epochs", *_epochs(config, rows.num_rows))
    open_batch = not {"per_device_train_batch_size", "gradient_accumulation_steps", "auto_batch_size"} & given
    if open_batch and not generates and config.privacy is None:
        section = config.chosen_sections().get(config.algorithm)
        min_batch = ALGORITHMS.type_of(config.algorithm).least_batch(section)
        per_step = max(min_batch, rows_per_step(rows.num_rows) // rows.num_processes)
        sizes = [size for size in (8, 4, 2, 1) if min_batch <= size <= per_step]
        limit = MEMORY_SHARE * memory_bytes

        def fits(size: int) -> bool:
            return peak_bytes(config.model_copy(update=_batch(size, per_step))) <= limit

        size = next(filter(fits, sizes), None)
        if size is None and "gradient_checkpointing" not in given and not config.gradient_checkpointing:
            choose("gradient_checkpointing", True, "without it, not even one row would fit into memory")
            size = next(filter(fits, sizes), None)
        is_adapter = TUNING.type_of(config.finetuning).is_adapter
        if size is None and is_adapter and not {"base_dtype", "dtype", "quantization"} & given:
            choose("base_dtype", "bfloat16", "in float32, the model would not fit into memory")
            size = next(filter(fits, sizes), None)
        smallest = "the smallest; it may still run out of memory: see gym train --plan"
        reason = "fits into memory" if size else smallest
        for key, value in _batch(size or sizes[-1], per_step).items():
            choose(key, value, reason if key.startswith("per") else f"{counted(per_step, 'row')} per step")
    return defaults


def rows_per_step(num_rows: int) -> int:
    """Return the rows per optimiser step for a dataset of this size."""
    return next((size for most, size in _ROWS_PER_STEP if num_rows <= most), _MAX_ROWS_PER_STEP)


def _batch(size: int, per_step: int) -> dict[str, int]:
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": max(1, per_step // size)}


def _length(rows: RowFacts, room: int) -> tuple[int, str]:
    """Return the row length and its reason; ``room`` tokens are reserved for an answer."""
    context = None if rows.context is None else max(_LENGTH_STEP, rows.context - room)
    if not rows.longest:
        return min(_JOINED_LENGTH, context or _JOINED_LENGTH), "rows are packed, or contain images"
    covered = rows.longest
    reason = f"the longest of {counted(rows.num_rows, 'row')} has {counted(rows.longest, 'token')}"
    if rows.longest > max(_OUTLIER * rows.usual, _JOINED_LENGTH):
        covered = rows.usual
        reason = f"95% of {counted(rows.num_rows, 'row')} have at most {counted(rows.usual, 'token')}"
        reason += f"; the longest, {rows.longest:,}, is cut"
    length = max(_MIN_LENGTH, -(-covered // _LENGTH_STEP) * _LENGTH_STEP)
    if context is not None and length > context:
        return context, f"{reason}; the model's context is {rows.context:,}"
    return length, reason


def _epochs(config: TrainingConfig, num_rows: int) -> tuple[float, str]:
    algorithm = ALGORITHMS.type_of(config.algorithm)
    max_epochs = _MAX_EPOCHS
    if algorithm.row_kind in _PREFERENCES:
        epochs, max_epochs = 1, _MAX_PREFERENCE_EPOCHS
    elif algorithm.row_kind != "supervised" or not algorithm.assistant_only_default:
        return 1.0, f"{config.algorithm} uses its rows once"
    else:
        epochs = next((epochs for most, epochs in _EPOCHS if num_rows <= most), 1)
    steps_per_epoch = math.ceil(num_rows / rows_per_step(num_rows))
    if epochs * steps_per_epoch < _MIN_STEPS:
        epochs = min(max_epochs, math.ceil(_MIN_STEPS / steps_per_epoch))
        steps = counted(epochs * steps_per_epoch, "step")
        return float(epochs), f"{counted(num_rows, 'row', 'are')} few: {steps}"
    return float(epochs), f"{counted(num_rows, 'row')}"


def split_default(config: TrainingConfig, num_rows: int) -> Default | None:
    """Choose the number of held-out rows; None if the config sets it or the algorithm has no held-out loss."""
    is_given = {"eval_split", "eval_data", "tokenized_path"} & config.model_fields_set
    if config.eval_data or is_given or config.eval_strategy == "no":
        return None
    algorithm = ALGORITHMS.type_of(config.algorithm)
    if algorithm.generates or algorithm.forgets or config.privacy is not None:
        return None
    if num_rows < _MIN_ROWS_TO_SPLIT:
        return None
    count = min(_MAX_HELD_OUT, max(_MIN_HELD_OUT, round(_HELD_OUT_SHARE * num_rows)))
    reason = f"of {counted(num_rows, 'row')}, to measure what is learned; never trained on"
    return Default("eval_split", float(count), reason)


def in_words(count: int) -> str:
    """Format a number of weights, such as ``135M``."""
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:,}"
